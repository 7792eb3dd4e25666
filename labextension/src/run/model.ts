import type { RecoveryRecord, RunState, Table } from '../records';
import { PLACE } from '../records';
import type { Axis } from './grid';
import { Grid } from './grid';
import { Series } from './series';

/** How the browser is connected to the run; `saved` needs no connection. */
export type Connection = 'connecting' | 'live' | 'reconnecting' | 'gone' | 'saved';

/** Bins of all ranks together, for each metric: some 4 MB. */
const BINS_OF_ALL = 2 ** 18;
const FEWEST_BINS = 512;
const MOST_BINS = 4096;

/** A rank that is beyond this was not meant. */
const MOST_RANKS = 2 ** 16;
/** Steps are counted exactly up to here. */
const LARGEST_PLACE = 2 ** 52;

const [RANK, EPOCH, STEP, TIME] = [0, 1, 2, 3];

/** What ranks said under one name: each for itself, or all the same. */
export class Metric {
  readonly own = new Map<number, Series>();
  shared: Series | null = null;
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

  /** A value that all ranks say alike is taken once: of the rank that came first with it. */
  addShared(rank: number, bin: number, place: number, value: number): void {
    this.shared ??= new Series(this.grid);
    if (rank !== this.source && place <= this.shared.lastPlace) {
      return;
    }
    this.source = rank;
    this.shared.add(bin, place, value);
  }

  /** The latest value of a rank, or of all; nan where there is none. */
  latest(rank: number): number {
    return (this.own.get(rank) ?? this.shared)?.lastValue ?? NaN;
  }

  /** The latest value: the shared one, or the mean of those of the ranks. */
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

/** How far a rank is. */
export interface Progress {
  readonly rank: number;
  step: number;
  epoch: number;
  seconds: number;
  /** Rows that had neither a step nor an epoch. */
  reports: number;
}

interface Column {
  readonly name: string;
  readonly kind: 'measure' | 'own' | 'shared';
}

interface TableReader {
  readonly columns: readonly Column[];
  readonly width: number;
  /** Nothing but what nbdist measured, which may be of earlier steps. */
  readonly isMeasured: boolean;
  /** What was left of the last message: the beginning of a row. */
  rest: Float64Array;
  readonly sinks: Map<Axis, Sink>;
}

/** Where the values of a table's columns go, of rows of one axis. */
interface Sink {
  readonly grid: Grid;
  readonly metrics: readonly Metric[];
  /** Of each rank the line of each column; null for what all ranks share. */
  readonly byRank: (readonly (Series | null)[])[];
}

/**
 * A run as the browser knows it: its state, and of each metric a bounded line for each rank.
 *
 * Of a run that was recovered steps come twice; the state that says so comes before they do again.
 */
export class RunModel {
  state: RunState | null = null;
  connection: Connection = 'connecting';
  /** All that the run had when it was opened is here. */
  isCaughtUp = false;
  /** Rows taken in. */
  rows = 0;

  private grids = new Map<Axis, Grid>();
  private metricsByKey = new Map<string, Metric>();
  private measuresByName = new Map<string, Metric>();
  private progressByRank = new Map<number, Progress>();
  private tables = new Map<number, TableReader>();
  private readonly listeners = new Set<() => void>();

  onState(state: RunState): void {
    const recoveries = state.heals.slice(this.state?.heals.length ?? 0);
    this.state = state;
    for (const recovery of recoveries) {
      this.forget(recovery);
    }
    this.changed();
  }

  onTable(table: Table): void {
    const { measures, own, shared } = table.columns;
    const columns: Column[] = [
      ...measures.map(name => ({ name, kind: 'measure' as const })),
      ...own.map(name => ({ name, kind: 'own' as const })),
      ...shared.map(name => ({ name, kind: 'shared' as const }))
    ];
    const width = PLACE.length + columns.length;
    const rest = new Float64Array(0);
    const isMeasured = measures.length === columns.length;
    this.tables.set(table.number, { columns, width, isMeasured, rest, sinks: new Map() });
    this.changed();
  }

  /** Take in `[table number, row, row, ...]`; a row that is cut goes on in the next message. */
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

  onCaughtUp(): void {
    this.isCaughtUp = true;
    this.changed();
  }

  onConnection(connection: Connection): void {
    this.connection = connection;
    this.changed();
  }

  /** Forget the rows: everything is sent again. */
  reset(): void {
    this.isCaughtUp = false;
    this.rows = 0;
    this.grids = new Map();
    this.metricsByKey = new Map();
    this.measuresByName = new Map();
    this.progressByRank = new Map();
    this.tables = new Map();
    this.changed();
  }

  /** Call `listener` whenever something changed; returns what ends that. */
  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** The metrics, loss first, else in the order in which they came. */
  metrics(): Metric[] {
    const all = [...this.metricsByKey.values()];
    const isLoss = (metric: Metric): number => (metric.name === 'loss' ? 0 : 1);
    return all.sort((a, b) => isLoss(a) - isLoss(b));
  }

  /** What nbdist measured of each step; undefined where it did not. */
  measure(name: string): Metric | undefined {
    return this.measuresByName.get(name);
  }

  /** How far a rank is; undefined where it has said nothing. */
  progress(rank: number): Progress | undefined {
    return this.progressByRank.get(rank);
  }

  /** How far the rank is that is farthest. */
  farthest(): Progress {
    const far: Progress = { rank: -1, step: -1, epoch: -1, seconds: 0, reports: 0 };
    for (const one of this.progressByRank.values()) {
      far.step = Math.max(far.step, one.step);
      far.epoch = Math.max(far.epoch, one.epoch);
      far.seconds = Math.max(far.seconds, one.seconds);
      far.reports = Math.max(far.reports, one.reports);
    }
    return far;
  }

  /** What came of steps that are made again: their rows follow, and are later than the recovery. */
  private forget({ step }: RecoveryRecord): void {
    this.grids.get('step')?.cut(step);
    for (const progress of this.progressByRank.values()) {
      progress.step = Math.min(progress.step, step);
    }
  }

  /** The step was made again after this, or is to be. */
  private isVoid(step: number, seconds: number): boolean {
    const recoveries = this.state?.heals ?? [];
    return recoveries.some(recovery => step > recovery.step && seconds < recovery.time_s);
  }

  private changed(): void {
    for (const listener of [...this.listeners]) {
      listener();
    }
  }

  private addRow(table: TableReader, rows: Float64Array, at: number): void {
    const rank = rows[at + RANK!]!;
    if (!(Number.isInteger(rank) && rank >= 0 && rank < MOST_RANKS)) {
      return;
    }
    if (this.isVoid(rows[at + STEP!]!, rows[at + TIME!]!)) {
      return;
    }
    const progress = this.progressOf(rank);
    const axis = advance(progress, rows, at, table.isMeasured);
    const place =
      axis === 'report' ? progress.reports : rows[at + (axis === 'step' ? STEP! : EPOCH!)]!;
    if (!(place <= LARGEST_PLACE)) {
      return;
    }
    const sink = this.sinkOf(table, axis);
    const bin = sink.grid.place(place);
    sink.grid.clock(bin, rows[at + TIME!]!);
    sink.grid.touch(bin);
    const lines = (sink.byRank[rank] ??= linesOf(table, sink.metrics, rank));
    for (let i = 0; i < lines.length; i++) {
      const value = rows[at + PLACE.length + i]!;
      const line = lines[i] ?? null;
      if (line === null) {
        sink.metrics[i]!.addShared(rank, bin, place, value);
      } else {
        line.add(bin, place, value);
      }
    }
    this.rows++;
  }

  private progressOf(rank: number): Progress {
    let progress = this.progressByRank.get(rank);
    if (progress === undefined) {
      progress = { rank, step: -1, epoch: -1, seconds: 0, reports: 0 };
      this.progressByRank.set(rank, progress);
    }
    return progress;
  }

  private sinkOf(table: TableReader, axis: Axis): Sink {
    let sink = table.sinks.get(axis);
    if (sink === undefined) {
      const metrics = table.columns.map(column => this.metricOf(column, axis));
      sink = { grid: this.grid(axis), metrics, byRank: [] };
      table.sinks.set(axis, sink);
    }
    return sink;
  }

  private metricOf({ name, kind }: Column, axis: Axis): Metric {
    const isMeasure = kind === 'measure';
    const all = isMeasure ? this.measuresByName : this.metricsByKey;
    const key = isMeasure && axis === 'step' ? name : `${axis} ${name}`;
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

/** How many bins a line has where there are so many ranks. */
export function binsFor(ranks: number): number {
  const each = 2 ** Math.floor(Math.log2(BINS_OF_ALL / Math.max(1, ranks)));
  return Math.min(MOST_BINS, Math.max(FEWEST_BINS, each));
}

/** Note where a row is; says what it is counted by. */
function advance(
  progress: Progress,
  rows: Float64Array,
  at: number,
  isMeasured: boolean
): Axis {
  const step = rows[at + STEP!]!;
  const epoch = rows[at + EPOCH!]!;
  const seconds = rows[at + TIME!]!;
  // A run that is read from its start comes table by table: a later table begins earlier.
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
  { columns }: TableReader,
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
