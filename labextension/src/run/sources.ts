import { SIGNALS } from '../records';
import type { Axis, Grid } from './grid';
import type { Metric, RunModel } from './model';
import type { ITrace } from './series';
import type { Unit } from './words';

/** A larger share of network time in a step is marked and reported as a finding. */
const NETWORK_LIMIT = 0.2;
/** A larger share of input time in a step means that ranks wait for data. */
const INPUT_LIMIT = 0.1;

/** Line of one rank. */
export interface ILine {
  readonly rank: number;
  readonly trace: ITrace;
}

/** Data of one chart. */
export interface ISource {
  readonly key: string;
  readonly title: string;
  readonly unit: Unit;
  /** Values are amounts, drawn on an axis from 0. */
  readonly isAmount: boolean;
  readonly grid: Grid;
  /** Name of the line over all ranks. */
  readonly wholeName: string;
  /** Name of the rank lines if it differs from the title. */
  readonly lineName: string;
  /** Threshold drawn in the chart. 0 if there is none. */
  readonly limit: number;
  /** Lines ordered by rank. */
  lines(): readonly ILine[];
  /** Line over all ranks. Null if it is the mean of the rank lines. */
  whole(): ITrace | null;
}

/** Traces of a metric's ranks, ordered by rank. */
class Lines {
  private lines: ILine[] = [];

  constructor(private readonly metric: Metric) {}

  get(): readonly ILine[] {
    if (this.lines.length !== this.metric.own.size) {
      this.lines = [...this.metric.own].map(([rank, trace]) => ({ rank, trace }));
      this.lines.sort((a, b) => a.rank - b.rank);
    }
    return this.lines;
  }
}

/** Metric as reported by the ranks. */
export class MetricSource implements ISource {
  readonly key: string;
  readonly grid: Grid;
  readonly lineName = '';
  readonly limit = 0;
  private readonly ranks: Lines;

  constructor(
    private readonly metric: Metric,
    readonly title: string,
    readonly unit: Unit,
    readonly isAmount: boolean
  ) {
    this.key = `${metric.grid.axis} ${metric.name}`;
    this.grid = metric.grid;
    this.ranks = new Lines(metric);
  }

  get wholeName(): string {
    return this.metric.shared === null ? 'mean' : 'all ranks';
  }

  lines(): readonly ILine[] {
    return this.ranks.get();
  }

  whole(): ITrace | null {
    return this.metric.shared;
  }
}

/** Line computed from others, bin by bin. */
class Computed implements ITrace {
  mean = new Float32Array(0);
  n = new Uint32Array(0);
  length = 0;
  readonly bad: Uint8Array;

  constructor(grid: Grid) {
    this.bad = new Uint8Array(grid.capacity);
  }

  get min(): Float32Array {
    return this.mean;
  }

  get max(): Float32Array {
    return this.mean;
  }

  reach(length: number): void {
    if (this.n.length < length) {
      this.mean = new Float32Array(2 * length);
      this.n = new Uint32Array(2 * length);
    }
    this.length = length;
  }

  set(bin: number, value: number): void {
    const isFinite = value - value === 0;
    this.mean[bin] = isFinite ? value : 0;
    this.n[bin] = isFinite ? 1 : 0;
  }

  /** Compute samples per second from step times in seconds and `batch` samples per step. */
  setRate(step: ITrace, batch: number): void {
    this.reach(step.length);
    for (let i = 0; i < step.length; i++) {
      this.set(i, step.n[i]! > 0 ? batch / step.mean[i]! : NaN);
    }
  }

  /** Compute the share of `part` in `step`, after subtraction of `base`. */
  setShare(part: ITrace, step: ITrace, base: Float32Array | null): void {
    this.reach(Math.min(part.length, step.length));
    for (let i = 0; i < this.length; i++) {
      const isThere = part.n[i]! > 0 && step.n[i]! > 0;
      const seconds = part.mean[i]! - (base === null ? 0 : base[i]!);
      this.set(i, isThere ? seconds / step.mean[i]! : NaN);
    }
  }
}

/** Function that computes a line from the reported line of a rank. */
type Compute = (line: ILine, out: Computed) => void;

/** Computed lines for the ranks of a metric. */
class ComputedLines {
  private readonly byRank = new Map<number, Computed>();
  private lines: ILine[] = [];

  constructor(private readonly grid: Grid) {}

  get(ranks: readonly ILine[], compute: Compute): readonly ILine[] {
    for (const line of ranks) {
      compute(line, this.of(line.rank));
    }
    if (this.lines.length !== ranks.length) {
      this.lines = ranks.map(({ rank }) => ({ rank, trace: this.of(rank) }));
    }
    return this.lines;
  }

  private of(rank: number): Computed {
    let computed = this.byRank.get(rank);
    if (computed === undefined) {
      computed = new Computed(this.grid);
      this.byRank.set(rank, computed);
    }
    return computed;
  }
}

/** Source with one computed line per rank. The line over all ranks is their mean. */
class ComputedSource implements ISource {
  readonly isAmount = true;
  readonly wholeName = 'mean';
  readonly lineName = '';
  readonly grid: Grid;
  private readonly ranks: Lines;
  private readonly computed: ComputedLines;

  constructor(
    readonly key: string,
    private readonly name: () => string,
    readonly unit: Unit,
    readonly limit: number,
    of: Metric,
    private readonly compute: Compute
  ) {
    this.grid = of.grid;
    this.ranks = new Lines(of);
    this.computed = new ComputedLines(of.grid);
  }

  get title(): string {
    return this.name();
  }

  lines(): readonly ILine[] {
    return this.computed.get(this.ranks.get(), this.compute);
  }

  whole(): null {
    return null;
  }
}

/** Return samples per second, or steps or reports per second if the batch size is unknown. */
function throughputSource(model: RunModel, step: Metric): ISource {
  const batch = (): number => model.state?.batch ?? 0;
  const [key, places] = model.timesReports ? ['reports', 'reports/s'] : ['throughput', 'steps/s'];
  const name = (): string => (batch() > 0 ? 'samples/s' : places);
  return new ComputedSource(key, name, 'number', 0, step, ({ trace }, out) =>
    out.setRate(trace, batch() || 1)
  );
}

/** Return the share of each step that the ranks wait for their batch. */
function inputSource(input: Metric, step: Metric): ISource {
  const name = (): string => 'input share of the step';
  return new ComputedSource('input', name, 'share', INPUT_LIMIT, input, ({ rank, trace }, out) =>
    out.setShare(trace, step.of(rank), null)
  );
}

/**
 * Network share of the steps: the minimum over ranks of the time in collectives. Additional time of
 * a rank in collectives is waiting for slower ranks.
 */
class NetworkSource implements ISource {
  readonly key = 'network';
  readonly title = 'network share of the step';
  readonly unit = 'share';
  readonly isAmount = true;
  readonly wholeName = 'network';
  readonly lineName = 'waiting';
  readonly limit = NETWORK_LIMIT;
  readonly grid: Grid;
  private readonly parts: Lines;
  private readonly steps: Lines;
  private readonly computed: ComputedLines;
  private readonly network: Computed;
  private least = new Float32Array(0);

  constructor(
    collective: Metric,
    private readonly step: Metric
  ) {
    this.grid = step.grid;
    this.parts = new Lines(collective);
    this.steps = new Lines(step);
    this.computed = new ComputedLines(step.grid);
    this.network = new Computed(step.grid);
  }

  lines(): readonly ILine[] {
    this.findLeast();
    return this.computed.get(this.parts.get(), ({ rank, trace }, out) =>
      out.setShare(trace, this.step.of(rank), this.least)
    );
  }

  whole(): ITrace {
    const seconds = new Float64Array(this.grid.length);
    const ranks = new Uint32Array(this.grid.length);
    for (const { trace } of this.steps.get()) {
      for (let i = 0; i < trace.length; i++) {
        seconds[i]! += trace.n[i]! > 0 ? trace.mean[i]! : 0;
        ranks[i]! += trace.n[i]! > 0 ? 1 : 0;
      }
    }
    this.findLeast();
    this.network.reach(this.grid.length);
    for (let i = 0; i < this.grid.length; i++) {
      this.network.set(i, (this.least[i]! * ranks[i]!) / seconds[i]!);
    }
    return this.network;
  }

  private findLeast(): void {
    if (this.least.length < this.grid.length) {
      this.least = new Float32Array(this.grid.capacity);
    }
    this.least.fill(Infinity);
    for (const { trace } of this.parts.get()) {
      for (let i = 0; i < trace.length; i++) {
        if (trace.n[i]! > 0 && trace.mean[i]! < this.least[i]!) {
          this.least[i] = trace.mean[i]!;
        }
      }
    }
  }
}

const PLACES: Record<Axis, string> = {
  step: 'by step',
  epoch: 'by epoch',
  report: 'by report',
  second: 'by second'
};

/** Place of the values by step of a `fit`: Keras logs the mean since the start of the epoch. */
const LOGGED_BY_KERAS = 'by step, as Keras logs it';

/**
 * Return one chart per metric. A metric with values by step and by epoch has two distinct titles.
 */
export function metricSources(model: RunModel): ISource[] {
  const metrics = model.metrics();
  const isFit = model.state?.kind === 'fit';
  return metrics.map(metric => {
    const { axis } = metric.grid;
    const isTwice = metrics.some(other => other !== metric && other.name === metric.name);
    const usual = isFit && axis === 'step' ? LOGGED_BY_KERAS : isTwice ? PLACES[axis] : '';
    const every = axis === 'step' && isSignal(metric.name) ? (model.state?.signal_steps ?? 0) : 0;
    const place = every > 0 ? `every ${every} steps` : usual;
    const title = place === '' ? metric.name : `${metric.name} (${place})`;
    return new MetricSource(metric, title, 'number', false);
  });
}

/** The metric is a signal of training in runs that record them. */
function isSignal(name: string): boolean {
  return SIGNALS.some(signal => name === signal || name.startsWith(`${signal} of `));
}

export function stepTimeSources(model: RunModel): ISource[] {
  const { pace, timesReports } = model;
  const title = timesReports ? 'between reports' : 'step time';
  return pace === undefined ? [] : [new MetricSource(pace, title, 'seconds', true)];
}

export function throughputSources(model: RunModel): ISource[] {
  const { pace } = model;
  return pace === undefined ? [] : [throughputSource(model, pace)];
}

/** Return charts of process memory, and of device memory if devices have their own. */
export function memorySources(model: RunModel): ISource[] {
  const titles = { process_bytes: 'process memory', device_bytes: 'device memory' };
  const sources: ISource[] = [];
  for (const [name, title] of Object.entries(titles)) {
    const metric = model.measure(name);
    if (metric !== undefined && isUsed(metric)) {
      sources.push(new MetricSource(metric, title, 'bytes', true));
    }
  }
  return sources;
}

export function shareSources(model: RunModel): ISource[] {
  const step = model.measure('step_s');
  const collective = model.measure('collective_s');
  const input = model.measure('input_s');
  const sources: ISource[] = [];
  if (step !== undefined && collective !== undefined) {
    sources.push(new NetworkSource(collective, step));
  }
  if (step !== undefined && input !== undefined) {
    sources.push(inputSource(input, step));
  }
  return sources;
}

function isUsed(metric: Metric): boolean {
  return [...metric.own.values()].some(series => series.lastValue > 0);
}
