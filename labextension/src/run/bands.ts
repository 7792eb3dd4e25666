import type { ICut } from './decimate';
import { Strip } from './decimate';
import type { Grid, IMark } from './grid';
import type { ILine } from './sources';

/** Stored quantiles of the ranks: extremes, middle 80 %, middle half and median. */
export const QUANTILES = [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1] as const;
export const MEDIAN = 3;

/** A rank is an outlier beyond this multiple of the interquartile range. */
const FAR_OUT = 3;
/** Fraction of the line, at its end, that decides if a rank is an outlier. */
const RECENT = 0.1;
const FEWEST_RECENT = 5;
const MOST_OUTLIERS = 4;

/** Quantiles over many ranks per bin. Recomputes only changed bins. */
export class Bands {
  readonly strips = QUANTILES.map(() => new Strip());
  private readonly values: readonly Float32Array[];
  private readonly mark: IMark;
  private scratch = new Float32Array(0);

  constructor(private readonly grid: Grid) {
    this.values = QUANTILES.map(() => new Float32Array(grid.capacity));
    this.mark = grid.mark();
  }

  dispose(): void {
    this.grid.unmark(this.mark);
  }

  update(lines: readonly ILine[]): void {
    if (this.scratch.length < lines.length) {
      this.scratch = new Float32Array(lines.length);
    }
    for (let bin = this.mark.from; bin < this.grid.length; bin++) {
      this.updateBin(lines, bin);
    }
    this.mark.from = Infinity;
  }

  /** Cut the bands into the columns of a picture. */
  fill(cut: ICut): void {
    this.strips.forEach((strip, i) => strip.fillPlain(this.values[i]!, this.grid.length, cut));
  }

  /** Return the ranks that differ most from the others at the end of their lines, largest first. */
  outliers(lines: readonly ILine[]): number[] {
    const recent = Math.max(FEWEST_RECENT, Math.floor(this.grid.length * RECENT));
    const means = lines.map(line => ({ rank: line.rank, mean: meanOfLast(line, recent) }));
    const known = means.filter(({ mean }) => !Number.isNaN(mean));
    const sorted = Float64Array.from(known, ({ mean }) => mean).sort();
    const [low, high] = [quantile(sorted, 0.25), quantile(sorted, 0.75)];
    const far = FAR_OUT * (high - low);
    const away = (mean: number): number => Math.max(low - mean, mean - high);
    return known
      .filter(({ mean }) => away(mean) > far)
      .sort((a, b) => away(b.mean) - away(a.mean))
      .slice(0, MOST_OUTLIERS)
      .map(({ rank }) => rank);
  }

  private updateBin(lines: readonly ILine[], bin: number): void {
    let known = 0;
    for (const { trace } of lines) {
      if (bin < trace.length && trace.n[bin]! > 0) {
        this.scratch[known++] = trace.mean[bin]!;
      }
    }
    const sorted = this.scratch.subarray(0, known).sort();
    QUANTILES.forEach((part, i) => (this.values[i]![bin] = quantile(sorted, part)));
  }
}

function meanOfLast({ trace }: ILine, bins: number): number {
  let sum = 0;
  let count = 0;
  for (let i = Math.max(0, trace.length - bins); i < trace.length; i++) {
    if (trace.n[i]! > 0) {
      sum += trace.mean[i]!;
      count++;
    }
  }
  return count > 0 ? sum / count : NaN;
}

/** Return a quantile of sorted values, by linear interpolation. */
export function quantile(sorted: Float32Array | Float64Array, part: number): number {
  if (sorted.length === 0) {
    return NaN;
  }
  const at = part * (sorted.length - 1);
  const below = sorted[Math.floor(at)]!;
  const above = sorted[Math.ceil(at)]!;
  return below + (above - below) * (at - Math.floor(at));
}
