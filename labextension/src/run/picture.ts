import type { IRecoveryRecord } from '../records';
import { Bands } from './bands';
import type { ICut } from './decimate';
import { cut, Strip } from './decimate';
import type { ISpan } from './span';
import { padded } from './span';
import { smooth } from './smooth';
import type { ILine, ISource } from './sources';

/** More lines than this are shown as bands. */
export const MOST_LINES = 64;
/** More lines than this are drawn at lower resolution, because they overlap. */
const MANY_LINES = 16;
/** Up to this number of lines, unsmoothed values are drawn behind them. */
const FEW_LINES = 8;

const MOST_NAMED = 8;

/** Settings shared by all charts of a view. */
export interface ISettings {
  readonly x: 'place' | 'time';
  /** Weight of earlier values in the smoothing, in 0..1. */
  readonly smoothing: number;
}

/** Line of a rank as drawn. */
export interface IDrawnLine {
  readonly rank: number;
  readonly strip: Strip;
  /** Values before smoothing. */
  readonly raw: Strip;
}

/** Data to draw for one source, one width and one span of the axis. */
export class Picture {
  lines: IDrawnLine[] = [];
  /** Full lines of all ranks. */
  ranks: readonly ILine[] = [];
  /** Line over all ranks. Null if there is only one line. */
  whole: Strip | null = null;
  /** Quantile bands. Null if there are few enough lines. */
  bands: Bands | null = null;
  /** Position of each column on the x axis. */
  x = new Float64Array(0);
  columns = 0;
  /** Visible bins. */
  bins: ICut = { from: 0, to: 0, per: 1, columns: 0 };
  /** Span of all data. */
  all: ISpan = { min: 0, max: 1 };
  shown: ISpan = { min: 0, max: 1 };
  y: ISpan = { min: 0, max: 1 };
  /** The y scale is logarithmic. */
  isLog = false;
  isSmoothed = false;
  /** Ranks drawn in addition to the bands. */
  private named: readonly number[] = [];

  /** Minimum and maximum over many lines that are not drawn themselves. */
  readonly envelope = new Strip();

  private readonly pool = new Map<number, IDrawnLine>();
  private readonly wholeStrip = new Strip();
  private smoothed = new Float32Array(0);

  constructor(
    readonly source: ISource,
    readonly hidden: ReadonlySet<number>
  ) {}

  dispose(): void {
    this.bands?.dispose();
  }

  /**
   * Cut the source for the visible span.
   *
   * Args:
   *   isLog: use a logarithmic scale if a value is positive.
   *   span: visible span. Null shows all data.
   *   width: width of the plot in pixels.
   */
  update(settings: ISettings, isLog: boolean, span: ISpan | null, width: number): void {
    const lines = this.source.lines();
    const places = this.places(settings);
    this.all = places.all;
    this.shown = span ?? places.all;
    const coarse = lines.length > MANY_LINES ? 2 : 1;
    const [from, to] = places.bins(this.shown);
    const bins = cut(from, to, Math.floor(width / coarse));
    this.bins = bins;
    this.columns = bins.columns;
    this.isSmoothed = settings.smoothing > 0;
    this.setX(bins, places.at);
    this.ranks = lines;
    this.setLines(lines, bins, settings.smoothing);
    this.setWhole(lines, bins, settings.smoothing);
    this.setRange(isLog);
  }

  /** Return the column nearest to a value of the axis. -1 if there is none. */
  columnAt(x: number): number {
    let best = -1;
    for (let i = 0; i < this.columns; i++) {
      if (best < 0 || Math.abs(this.x[i]! - x) < Math.abs(this.x[best]! - x)) {
        best = i;
      }
    }
    return best;
  }

  /**
   * Return the last column up to this one with a value, because some metrics come every few steps.
   * Return this column if none of them has a value.
   */
  filled(column: number): number {
    const strips = [...this.lines.map(({ strip }) => strip), ...(this.bands?.strips ?? [])];
    if (this.whole !== null) {
      strips.push(this.whole);
    }
    for (let i = column; i >= 0; i--) {
      if (strips.some(({ mean, bad }) => !Number.isNaN(mean[i]!) || bad[i] !== 0)) {
        return i;
      }
    }
    return column;
  }

  /** Return the position of a recovery in the visible span, from 0 (left) to 1 (right). */
  partOf({ step, time_s: time }: IRecoveryRecord, { x }: ISettings): number {
    const { grid } = this.source;
    let place = x === 'time' ? time : Math.max(step, grid.first);
    if (x === 'place' && grid.axis !== 'step') {
      const after = grid
        .seconds()
        .subarray(0, grid.length)
        .findIndex(began => began >= time);
      place = after < 0 ? grid.last : grid.at(after);
    }
    return (place - this.shown.min) / (this.shown.max - this.shown.min);
  }

  private places({ x }: ISettings): IPlaces {
    const { grid } = this.source;
    if (x === 'time') {
      return inTime(grid.seconds(), grid.length, grid.binOf(grid.first));
    }
    return {
      all: spanOf(grid.first, grid.last),
      at: bin => Math.max(grid.first, grid.at(bin)),
      bins: shown => [
        Math.max(0, grid.binOf(shown.min) - 1),
        Math.min(grid.length, grid.binOf(shown.max) + 2)
      ]
    };
  }

  private setX(bins: ICut, at: (bin: number) => number): void {
    if (this.x.length < bins.columns) {
      this.x = new Float64Array(2 * bins.columns);
    }
    for (let column = 0; column < bins.columns; column++) {
      this.x[column] = at(bins.from + column * bins.per);
    }
  }

  private setLines(lines: readonly ILine[], bins: ICut, weight: number): void {
    if (lines.length <= MOST_LINES) {
      this.bands?.dispose();
      this.bands = null;
      this.lines = lines.map(line => this.drawn(line, bins, weight));
      return;
    }
    this.bands ??= new Bands(this.source.grid);
    this.bands.update(lines);
    this.bands.fill(bins);
    const named = new Set(this.named);
    const chosen = lines.filter(line => named.has(line.rank));
    this.lines = chosen.map(line => this.drawn(line, bins, weight));
  }

  private drawn(line: ILine, bins: ICut, weight: number): IDrawnLine {
    let drawn = this.pool.get(line.rank);
    if (drawn === undefined) {
      drawn = { rank: line.rank, strip: new Strip(), raw: new Strip() };
      this.pool.set(line.rank, drawn);
    }
    this.fillStrip(drawn.strip, line.trace, bins, weight);
    if (weight > 0 && this.hasRaw) {
      drawn.raw.fill(line.trace, bins);
    }
    return drawn;
  }

  /** Unsmoothed values are visible behind the lines. */
  get hasRaw(): boolean {
    return this.isSmoothed && this.lines.length <= FEW_LINES && this.bands === null;
  }

  private fillStrip(strip: Strip, trace: ILine['trace'], bins: ICut, weight: number): void {
    if (weight === 0) {
      strip.fill(trace, bins);
      return;
    }
    if (this.smoothed.length < trace.length) {
      this.smoothed = new Float32Array(2 * trace.length);
    }
    smooth(trace, weight, this.smoothed);
    strip.fillPlain(this.smoothed, trace.length, bins);
    strip.takeBad(trace, bins);
  }

  /** Select ranks to draw with the bands: `others` first, then outliers. */
  name(others: readonly number[]): void {
    const far = this.bands?.outliers(this.ranks) ?? [];
    this.named = [...new Set([...others, ...far])].slice(0, MOST_NAMED);
  }

  private setWhole(lines: readonly ILine[], bins: ICut, weight: number): void {
    const trace = this.source.whole();
    this.whole = null;
    if (trace !== null) {
      this.whole = this.wholeStrip;
      this.fillStrip(this.whole, trace, bins, weight);
    } else if (lines.length > 1 && this.bands === null) {
      this.whole = this.wholeStrip;
      this.whole.fillMean(
        this.lines.map(line => line.strip),
        bins.columns
      );
    }
  }

  private setRange(isLog: boolean): void {
    const range = new Range(this.columns);
    for (const line of this.lines) {
      if (!this.hidden.has(line.rank)) {
        range.take(this.hasRaw ? line.raw : line.strip);
      }
    }
    for (const strip of [this.whole, ...(this.bands?.strips ?? [])]) {
      if (strip !== null) {
        range.take(strip);
      }
    }
    this.isLog = isLog && range.high > 0;
    this.y = this.isLog ? range.log() : range.linear(this.source.isAmount);
  }
}

interface IPlaces {
  readonly all: ISpan;
  readonly at: (bin: number) => number;
  readonly bins: (shown: ISpan) => [number, number];
}

function spanOf(min: number, max: number): ISpan {
  if (!(min <= max)) {
    return { min: 0, max: 1 };
  }
  return min < max ? { min, max } : { min: min - 0.5, max: max + 0.5 };
}

function inTime(seconds: Float64Array, length: number, first: number): IPlaces {
  const at = (bin: number): number => seconds[Math.min(length - 1, bin)]!;
  const from = (time: number): number => {
    let [low, high] = [0, length];
    while (low < high) {
      const middle = (low + high) >> 1;
      [low, high] = at(middle) < time ? [middle + 1, high] : [low, middle];
    }
    return low;
  };
  return {
    all: spanOf(length > 0 ? at(Math.max(0, first)) : 0, length > 0 ? at(length - 1) : 0),
    at,
    bins: shown => [Math.max(0, from(shown.min) - 1), Math.min(length, from(shown.max) + 2)]
  };
}

/** Minimum and maximum over strips. */
class Range {
  low = Infinity;
  high = -Infinity;
  private leastPositive = Infinity;

  constructor(private readonly columns: number) {}

  take({ low, high }: Strip): void {
    for (let i = 0; i < this.columns; i++) {
      if (low[i]! < this.low) {
        this.low = low[i]!;
      }
      if (high[i]! > this.high) {
        this.high = high[i]!;
      }
      const positive = low[i]! > 0 ? low[i]! : high[i]!;
      if (positive > 0 && positive < this.leastPositive) {
        this.leastPositive = positive;
      }
    }
  }

  log(): ISpan {
    return padded(this.leastPositive, this.high, true);
  }

  linear(isAmount: boolean): ISpan {
    if (this.low > this.high) {
      return { min: 0, max: 1 };
    }
    const span = padded(isAmount ? Math.min(0, this.low) : this.low, this.high, false);
    return isAmount && this.low >= 0 ? { min: 0, max: span.max } : span;
  }
}
