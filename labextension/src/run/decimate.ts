import type { ITrace } from './series';

/** Visible bins, and the number of bins per column of the picture. */
export interface ICut {
  readonly from: number;
  /** End of the range, exclusive. */
  readonly to: number;
  readonly per: number;
  readonly columns: number;
}

/**
 * Cut the bins `from..to` into at most `most` columns, plus one at each end.
 *
 * Columns start at multiples of their width. Otherwise a growing line would flicker.
 */
export function cut(from: number, to: number, most: number): ICut {
  const per = Math.max(1, Math.ceil((to - from) / Math.max(1, most)));
  const first = Math.floor(from / per) * per;
  return { from: first, to, per, columns: Math.max(0, Math.ceil((to - first) / per)) };
}

/** Line as drawn: minimum, maximum and mean of each column. NaN if the column is empty. */
export class Strip {
  low = new Float32Array(0);
  high = new Float32Array(0);
  mean = new Float32Array(0);
  bad = new Uint8Array(0);
  columns = 0;
  /** Latest value of the line, not the mean of its last bin. NaN if that is not visible. */
  latest = NaN;

  private clear(columns: number): void {
    this.columns = columns;
    this.latest = NaN;
    if (this.low.length < columns) {
      const size = 2 * columns;
      this.low = new Float32Array(size);
      this.high = new Float32Array(size);
      this.mean = new Float32Array(size);
      this.bad = new Uint8Array(size);
    }
  }

  /** Fill from the bins of `cut`. Extremes of each column are kept. */
  fill(trace: ITrace, { from, to, per, columns }: ICut): this {
    this.clear(columns);
    const { min, max, mean, n, bad } = trace;
    const end = Math.min(to, trace.length);
    this.latest = to >= trace.length ? (trace.lastValue ?? NaN) : NaN;
    for (let column = 0, bin = from; column < columns; column++) {
      let low = Infinity;
      let high = -Infinity;
      let sum = 0;
      let count = 0;
      let bits = 0;
      for (const stop = Math.min(end, bin + per); bin < stop; bin++) {
        bits |= bad[bin]!;
        const weight = n[bin]!;
        if (weight > 0) {
          low = min[bin]! < low ? min[bin]! : low;
          high = max[bin]! > high ? max[bin]! : high;
          sum += mean[bin]! * weight;
          count += weight;
        }
      }
      this.low[column] = count > 0 ? low : NaN;
      this.high[column] = count > 0 ? high : NaN;
      this.mean[column] = count > 0 ? sum / count : NaN;
      this.bad[column] = bits;
    }
    return this;
  }

  /** Fill from one value per bin. NaN marks a missing value. */
  fillPlain(values: Float32Array, length: number, { from, to, per, columns }: ICut): void {
    this.clear(columns);
    const end = Math.min(to, length);
    for (let column = 0, bin = from; column < columns; column++) {
      let low = Infinity;
      let high = -Infinity;
      let sum = 0;
      let count = 0;
      for (const stop = Math.min(end, bin + per); bin < stop; bin++) {
        const value = values[bin]!;
        if (value === value) {
          low = value < low ? value : low;
          high = value > high ? value : high;
          sum += value;
          count++;
        }
      }
      this.low[column] = count > 0 ? low : NaN;
      this.high[column] = count > 0 ? high : NaN;
      this.mean[column] = count > 0 ? sum / count : NaN;
      this.bad[column] = 0;
    }
  }

  /** Mark columns of `cut` that contain non-finite values. */
  takeBad({ bad, length }: ITrace, { from, to, per, columns }: ICut): void {
    const end = Math.min(to, length);
    for (let column = 0, bin = from; column < columns; column++) {
      for (const stop = Math.min(end, bin + per); bin < stop; bin++) {
        this.bad[column]! |= bad[bin]!;
      }
    }
  }

  /** Fill with minimum and maximum of several lines per column. */
  fillEnvelope(strips: readonly Strip[], columns: number): void {
    this.clear(columns);
    this.bad.fill(0);
    for (let column = 0; column < columns; column++) {
      let low = Infinity;
      let high = -Infinity;
      for (const strip of strips) {
        low = strip.low[column]! < low ? strip.low[column]! : low;
        high = strip.high[column]! > high ? strip.high[column]! : high;
      }
      this.low[column] = low <= high ? low : NaN;
      this.high[column] = low <= high ? high : NaN;
      this.mean[column] = NaN;
    }
  }

  /** Fill with the mean per column of the lines that have a value there. */
  fillMean(strips: readonly Strip[], columns: number): void {
    this.clear(columns);
    this.latest = strips.reduce((sum, { latest }) => sum + latest, 0) / strips.length;
    for (let column = 0; column < columns; column++) {
      let sum = 0;
      let count = 0;
      for (const strip of strips) {
        const value = strip.mean[column]!;
        if (value === value) {
          sum += value;
          count++;
        }
      }
      const mean = count > 0 ? sum / count : NaN;
      this.low[column] = this.high[column] = this.mean[column] = mean;
      this.bad[column] = 0;
    }
  }
}
