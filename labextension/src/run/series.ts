import type { IBinned, Grid, IMove } from './grid';

/** Bit for NaN. */
export const NOT_A_NUMBER = 1;
/** Bit for values above the float32 range. */
export const TOO_HIGH = 2;
/** Bit for values below the float32 range. */
export const TOO_LOW = 4;

const LARGEST = 3.4e38; // limit of float32, the type of the bins
const FIRST_SIZE = 64;

/**
 * Line over the bins of a grid.
 *
 * Each bin contains minimum, maximum and mean of its finite values, their number (0 if empty), and
 * bits for the kinds of non-finite values.
 */
export interface ITrace {
  readonly min: Float32Array;
  readonly max: Float32Array;
  readonly mean: Float32Array;
  readonly n: Uint32Array;
  readonly bad: Uint8Array;
  /** Number of used bins. The arrays may be longer. */
  readonly length: number;
  /** Latest value. Missing if the trace is computed from others. */
  readonly lastValue?: number;
}

/** Values of one metric of one rank, in at most `grid.capacity` bins. */
export class Series implements ITrace, IBinned {
  min = new Float32Array(0);
  max = new Float32Array(0);
  mean = new Float32Array(0);
  n = new Uint32Array(0);
  bad = new Uint8Array(0);
  length = 0;
  /** Place of the latest value. */
  lastPlace = -Infinity;
  /** Latest value, unrounded. */
  lastValue = NaN;

  constructor(private readonly grid: Grid) {
    grid.join(this);
  }

  add(bin: number, place: number, value: number): void {
    if (bin >= this.length) {
      this.reach(bin + 1);
    }
    if (place >= this.lastPlace) {
      this.lastPlace = place;
      this.lastValue = value;
    }
    if (!(value <= LARGEST && value >= -LARGEST)) {
      this.bad[bin]! |= value > 0 ? TOO_HIGH : value < 0 ? TOO_LOW : NOT_A_NUMBER;
      return;
    }
    const count = ++this.n[bin]!;
    if (count === 1) {
      this.min[bin] = this.max[bin] = this.mean[bin] = value;
      return;
    }
    if (value < this.min[bin]!) {
      this.min[bin] = value;
    }
    if (value > this.max[bin]!) {
      this.max[bin] = value;
    }
    this.mean[bin]! += (value - this.mean[bin]!) / count;
  }

  move({ to }: IMove): void {
    const { min, max, mean, n, bad, length } = this;
    if (to(0) > 0) {
      this.allocate(n.length); // moved bins would overwrite others in place
    }
    this.length = 0;
    for (let i = 0; i < length; i++) {
      const count = n[i]!;
      const bits = bad[i]!;
      if (count > 0 || bits > 0) {
        n[i] = 0;
        bad[i] = 0;
        this.merge(to(i), min[i]!, max[i]!, mean[i]!, count, bits);
      }
    }
  }

  cut(length: number, place: number): void {
    if (this.lastPlace <= place) {
      return;
    }
    this.n.fill(0, length);
    this.bad.fill(0, length);
    this.length = Math.min(this.length, length);
    this.lastPlace = place;
    this.lastValue = this.recent(1);
  }

  /**
   * Return the mean over at least `count` latest values, or over all if fewer. NaN if there are
   * none.
   */
  recent(count: number): number {
    let sum = 0;
    let seen = 0;
    for (let i = this.length - 1; i >= 0 && seen < count; i--) {
      const n = this.n[i]!;
      sum += n > 0 ? this.mean[i]! * n : 0;
      seen += n;
    }
    return seen > 0 ? sum / seen : NaN;
  }

  private merge(bin: number, min: number, max: number, mean: number, n: number, bad: number): void {
    if (bin >= this.length) {
      this.reach(bin + 1);
    }
    this.bad[bin]! |= bad;
    if (n === 0) {
      return;
    }
    const before = this.n[bin]!;
    this.n[bin] = before + n;
    this.min[bin] = before ? Math.min(this.min[bin]!, min) : min;
    this.max[bin] = before ? Math.max(this.max[bin]!, max) : max;
    this.mean[bin] = before
      ? this.mean[bin]! + ((mean - this.mean[bin]!) * n) / (before + n)
      : mean;
  }

  private reach(length: number): void {
    this.length = length;
    if (length > this.n.length) {
      const size = Math.max(FIRST_SIZE, 2 ** Math.ceil(Math.log2(length)));
      this.allocate(Math.min(size, this.grid.capacity));
    }
  }

  private allocate(size: number): void {
    const isLonger = size > this.n.length;
    const keep = <T extends Float32Array | Uint32Array | Uint8Array>(fresh: T, old: T): T => {
      if (isLonger) {
        fresh.set(old);
      }
      return fresh;
    };
    this.min = keep(new Float32Array(size), this.min);
    this.max = keep(new Float32Array(size), this.max);
    this.mean = keep(new Float32Array(size), this.mean);
    this.n = keep(new Uint32Array(size), this.n);
    this.bad = keep(new Uint8Array(size), this.bad);
  }
}
