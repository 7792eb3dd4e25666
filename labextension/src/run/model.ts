import type { IMediaEntry, IRecoveryRecord, IRunState, ITable } from '../records';
import { PLACE } from '../records';
import type { Axis } from './grid';
import { Grid } from './grid';
import { MediaIndex } from './mediaindex';
import { Series } from './series';

/** Connection of the browser to the run. `saved` runs need none. */
export type Connection = 'connecting' | 'live' | 'reconnecting' | 'gone' | 'unreadable' | 'saved';

/** Total bins of all ranks per metric: about 4 MB. */
const BINS_OF_ALL = 2 ** 18;
const FEWEST_BINS = 512;
const MOST_BINS = 4096;

/** Larger ranks are treated as invalid. */
const MOST_RANKS = 2 ** 16;
/** Largest step that is counted exactly. */
const LARGEST_PLACE = 2 ** 52;

/** Name of the measured times between calls of `report`. */
export const BETWEEN_REPORTS = 'report_s';

const [RANK, EPOCH, STEP, TIME] = [0, 1, 2, 3];

/** Values under one name: one series per rank, or one series shared by all ranks. */
export class Metric {
  readonly own = new Map<number, Series>();
  shared: Series | null = null;
  /** Time of the latest value, in seconds of the run. */
  seconds = -Infinity;
  private source = -1;

  constructor(
    readonly name: string,
    readonly grid: Grid
  ) {}

  of(rank: number): Series {
    let series = this.own.get(rank);
    if (series === undefined) {
      series = new Series(this.grid);
      this.own.set(rank, series);
    }
    return series;
  }

  /** Add a value that is equal on all ranks. The first rank that sends it is used. */
  addShared(rank: number, bin: number, place: number, value: number): void {
    this.shared ??= new Series(this.grid);
    if (rank !== this.source && place <= this.shared.lastPlace) {
      return;
    }
    this.source = rank;
    this.shared.add(bin, place, value);
  }

  /** Return the latest value of a rank, or of all ranks. NaN if there is none. */
  latest(rank: number): number {
    return (this.own.get(rank) ?? this.shared)?.lastValue ?? NaN;
  }

  /** Return the latest shared value, or the mean over the latest values of the ranks. */
  latestOfAll(): number {
    if (this.shared !== null) {
      return this.shared.lastValue;
    }
    let sum = 0;
    for (const series of this.own.values()) {
      sum += series.lastValue;
    }
    return this.own.size > 0 ? sum / this.own.size : NaN;
  }
}

/** Progress of a rank. */
export interface IProgress {
  readonly rank: number;
  step: number;
  epoch: number;
  seconds: number;
  /** Number of rows with neither a step nor an epoch. */
  reports: number;
}

interface IColumn {
  readonly name: string;
  readonly kind: 'measure' | 'own' | 'shared' | 'system';
}

interface ITableReader {
  readonly columns: readonly IColumn[];
  readonly width: number;
  /** The table contains only measurements of nbdist. They may belong to earlier steps. */
  readonly isMeasured: boolean;
  /** The table contains samples of the hosts, by time. */
  readonly isSystem: boolean;
  /** Incomplete row at the end of the last message. */
  rest: Float64Array;
  readonly sinks: Map<Axis, ISink>;
}

/** Destination of a table's columns for rows of one axis. */
interface ISink {
  readonly grid: Grid;
  readonly metrics: readonly Metric[];
  /** Series per column, by rank. Null for values shared by all ranks. */
  readonly byRank: (readonly (Series | null)[])[];
}

/**
 * Data of a run in the browser: its state, and per metric one bounded series per rank.
 *
 * A recovered run repeats steps. The state that announces a recovery arrives before the repeated
 * steps.
 */
export class RunModel {
  state: IRunState | null = null;
  connection: Connection = 'connecting';
  /** Reason why the server cannot read an `unreadable` run, else empty. */
  reason = '';
  /** All data that existed at the connection has arrived. */
  isCaughtUp = false;
  /** Number of received rows. */
  rows = 0;
  /** Histograms, images, tables and texts. */
  media = new MediaIndex();

  private grids = new Map<Axis, Grid>();
  private metricsByKey = new Map<string, Metric>();
  private measuresByName = new Map<string, Metric>();
  private systemByName = new Map<string, Metric>();
  private progressByRank = new Map<number, IProgress>();
  private tables = new Map<number, ITableReader>();
  private readonly listeners = new Set<() => void>();

  onState(state: IRunState): void {
    const recoveries = state.heals.slice(this.state?.heals.length ?? 0);
    this.state = state;
    for (const recovery of recoveries) {
      this.forget(recovery);
    }
    this.changed();
  }

  onName(name: string): void {
    if (this.state !== null && this.state.name !== name) {
      this.state = { ...this.state, name };
      this.changed();
    }
  }

  onTable(table: ITable): void {
    const { measures, own, shared, system } = table.columns;
    const columns: IColumn[] = [
      ...measures.map(name => ({ name, kind: 'measure' as const })),
      ...own.map(name => ({ name, kind: 'own' as const })),
      ...shared.map(name => ({ name, kind: 'shared' as const })),
      ...system.map(name => ({ name, kind: 'system' as const }))
    ];
    const width = PLACE.length + columns.length;
    const rest = new Float64Array(0);
    const isMeasured = measures.length === columns.length;
    const isSystem = system.length > 0;
    const sinks = new Map<Axis, ISink>();
    this.tables.set(table.number, { columns, width, isMeasured, isSystem, rest, sinks });
    this.changed();
  }

  /** Add `[table number, row, row, ...]`. An incomplete row continues in the next message. */
  onRows(values: Float64Array): void {
    const table = this.tables.get(values[0] ?? -1);
    if (table === undefined) {
      return;
    }
    let rows = values.subarray(1);
    if (table.rest.length > 0) {
      rows = joined(table.rest, rows);
    }
    const whole = rows.length - (rows.length % table.width);
    table.rest = rows.slice(whole);
    for (let at = 0; at < whole; at += table.width) {
      this.addRow(table, rows, at);
    }
    this.changed();
  }

  onMedia(entries: readonly IMediaEntry[]): void {
    entries.forEach(entry => this.media.add(entry));
    this.changed();
  }

  onCaughtUp(): void {
    this.isCaughtUp = true;
    this.changed();
  }

  onConnection(connection: Connection, reason = ''): void {
    this.connection = connection;
    this.reason = reason;
    this.changed();
  }

  /** Discard all rows: the server sends them again. */
  reset(): void {
    this.isCaughtUp = false;
    this.rows = 0;
    this.media = new MediaIndex();
    this.grids = new Map();
    this.metricsByKey = new Map();
    this.measuresByName = new Map();
    this.systemByName = new Map();
    this.progressByRank = new Map();
    this.tables = new Map();
    this.changed();
  }

  /** Call `listener` after each change. Returns a function that unsubscribes. */
  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Return the metrics: loss first, others in order of arrival. */
  metrics(): Metric[] {
    const all = [...this.metricsByKey.values()];
    const isLoss = (metric: Metric): number => (metric.name === 'loss' ? 0 : 1);
    return all.sort((a, b) => isLoss(a) - isLoss(b));
  }

  /** Return a measurement of nbdist per step. Undefined if it was not measured. */
  measure(name: string): Metric | undefined {
    return this.measuresByName.get(name);
  }

  /**
   * Return the times of steps, or those between calls of `report` if the run times no steps.
   * Undefined without such times.
   */
  get pace(): Metric | undefined {
    return this.measure('step_s') ?? this.measure(BETWEEN_REPORTS);
  }

  /** Return true if `pace` has the times between calls of `report`. */
  get timesReports(): boolean {
    return this.pace?.name === BETWEEN_REPORTS;
  }

  /** Return a sample of the hosts by time. Undefined if it was not measured. */
  system(name: string): Metric | undefined {
    return this.systemByName.get(name);
  }

  /** Return the progress of a rank. Undefined if it sent no rows. */
  progress(rank: number): IProgress | undefined {
    return this.progressByRank.get(rank);
  }

  /** Return the largest step, epoch, time and report count over all ranks. */
  farthest(): IProgress {
    const far: IProgress = { rank: -1, step: -1, epoch: -1, seconds: 0, reports: 0 };
    for (const one of this.progressByRank.values()) {
      far.step = Math.max(far.step, one.step);
      far.epoch = Math.max(far.epoch, one.epoch);
      far.seconds = Math.max(far.seconds, one.seconds);
      far.reports = Math.max(far.reports, one.reports);
    }
    return far;
  }

  /** Discard rows of repeated steps. The new rows arrive later than the recovery. */
  private forget({ step }: IRecoveryRecord): void {
    this.grids.get('step')?.cut(step);
    for (const progress of this.progressByRank.values()) {
      progress.step = Math.min(progress.step, step);
    }
  }

  /** Return true if a recovery repeats this step after the row was made. */
  private isVoid(step: number, seconds: number): boolean {
    const recoveries = this.state?.heals ?? [];
    return recoveries.some(recovery => step > recovery.step && seconds < recovery.time_s);
  }

  private changed(): void {
    for (const listener of [...this.listeners]) {
      listener();
    }
  }

  private addRow(table: ITableReader, rows: Float64Array, at: number): void {
    const rank = rows[at + RANK!]!;
    if (!(Number.isInteger(rank) && rank >= 0 && rank < MOST_RANKS)) {
      return;
    }
    if (table.isSystem) {
      this.addValues(table, rows, at, 'second', Math.floor(rows[at + TIME!]!));
      return;
    }
    if (this.isVoid(rows[at + STEP!]!, rows[at + TIME!]!)) {
      return;
    }
    const progress = this.progressOf(rank);
    const axis = advance(progress, rows, at, table.isMeasured);
    const place =
      axis === 'report' ? progress.reports : rows[at + (axis === 'step' ? STEP! : EPOCH!)]!;
    this.addValues(table, rows, at, axis, place);
  }

  private addValues(
    table: ITableReader,
    rows: Float64Array,
    at: number,
    axis: Axis,
    place: number
  ): void {
    if (!(place <= LARGEST_PLACE)) {
      return;
    }
    const rank = rows[at + RANK!]!;
    const sink = this.sinkOf(table, axis);
    const bin = sink.grid.place(place);
    sink.grid.clock(bin, rows[at + TIME!]!);
    sink.grid.touch(bin);
    const lines = (sink.byRank[rank] ??= linesOf(table, sink.metrics, rank));
    const seconds = rows[at + TIME!]!;
    for (let i = 0; i < lines.length; i++) {
      const metric = sink.metrics[i]!;
      metric.seconds = seconds > metric.seconds ? seconds : metric.seconds;
      const value = rows[at + PLACE.length + i]!;
      const line = lines[i] ?? null;
      if (line === null) {
        metric.addShared(rank, bin, place, value);
      } else {
        line.add(bin, place, value);
      }
    }
    this.rows++;
  }

  private progressOf(rank: number): IProgress {
    let progress = this.progressByRank.get(rank);
    if (progress === undefined) {
      progress = { rank, step: -1, epoch: -1, seconds: 0, reports: 0 };
      this.progressByRank.set(rank, progress);
    }
    return progress;
  }

  private sinkOf(table: ITableReader, axis: Axis): ISink {
    let sink = table.sinks.get(axis);
    if (sink === undefined) {
      const metrics = table.columns.map(column => this.metricOf(column, axis));
      sink = { grid: this.grid(axis), metrics, byRank: [] };
      table.sinks.set(axis, sink);
    }
    return sink;
  }

  private metricOf({ name, kind }: IColumn, axis: Axis): Metric {
    const isMeasure = kind === 'measure';
    const isSystem = kind === 'system';
    const ofRanks = isMeasure ? this.measuresByName : this.metricsByKey;
    const all = isSystem ? this.systemByName : ofRanks;
    const key = isSystem || (isMeasure && axis === 'step') ? name : `${axis} ${name}`;
    let metric = all.get(key);
    if (metric === undefined) {
      metric = new Metric(name, this.grid(axis));
      all.set(key, metric);
    }
    return metric;
  }

  private grid(axis: Axis): Grid {
    let grid = this.grids.get(axis);
    if (grid === undefined) {
      grid = new Grid(axis, binsFor(this.state?.workers.length ?? 1));
      this.grids.set(axis, grid);
    }
    return grid;
  }
}

/** Return the number of bins per series for a number of ranks. */
export function binsFor(ranks: number): number {
  const each = 2 ** Math.floor(Math.log2(BINS_OF_ALL / Math.max(1, ranks)));
  return Math.min(MOST_BINS, Math.max(FEWEST_BINS, each));
}

/** Record the position of a row. Returns the axis that counts it. */
function advance(progress: IProgress, rows: Float64Array, at: number, isMeasured: boolean): Axis {
  const step = rows[at + STEP!]!;
  const epoch = rows[at + EPOCH!]!;
  const seconds = rows[at + TIME!]!;
  // The server sends a run table by table, so a later table starts at an earlier time.
  const isLater = !(seconds < progress.seconds) && !(isMeasured && step < progress.step);
  if (isLater && epoch >= 0) {
    progress.epoch = epoch;
  }
  if (isLater && seconds >= 0 && seconds < Infinity) {
    progress.seconds = seconds;
  }
  if (isLater && step >= 0) {
    progress.step = step;
  }
  if (step >= 0) {
    return 'step';
  }
  if (epoch >= 0) {
    return 'epoch';
  }
  progress.reports++;
  return 'report';
}

function linesOf(
  { columns }: ITableReader,
  metrics: readonly Metric[],
  rank: number
): (Series | null)[] {
  return metrics.map((metric, i) => (columns[i]!.kind === 'shared' ? null : metric.of(rank)));
}

function joined(first: Float64Array, second: Float64Array): Float64Array {
  const both = new Float64Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}
