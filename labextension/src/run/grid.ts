/** Position of a row: its step, its epoch, its index if it has neither, or its second. */
export type Axis = 'step' | 'epoch' | 'report' | 'second';

/** Change of the bins of a grid: bin `i` became bin `to(i)`. */
export interface IMove {
  readonly to: (bin: number) => number;
}

/** Container of values in the bins of a grid. */
export interface IBinned {
  move(move: IMove): void;
  /** Clear the bins from `length` on. No data remains beyond `place`. */
  cut(length: number, place: number): void;
}

/** First bin that a reader must read again. */
export interface IMark {
  from: number;
}

/** A larger backward jump means that a clock was set. A smaller one is skew between ranks. */
const CLOCK_SET_S = 1;

/** Fraction of all bins reserved below a place that precedes the first one. */
const ROOM_BELOW = 8;

/**
 * Bins over one axis, shared by all ranks and metrics.
 *
 * Each bin covers `stride` places. The stride doubles when more than `capacity` bins are needed.
 * This bounds the memory of long runs and keeps the shape of their lines.
 */
export class Grid {
  /** First place of bin 0. */
  origin = 0;
  /** Number of places per bin. */
  stride = 1;
  /** Number of used bins. */
  length = 0;
  /** Smallest place seen. */
  first = Infinity;
  last = -Infinity;

  private readonly members = new Set<IBinned>();
  private readonly marks = new Set<IMark>();
  /** Start time of each bin in seconds. Infinite if unknown. */
  private times: Float64Array;
  private readonly unwrapped: Float64Array;

  constructor(
    readonly axis: Axis,
    readonly capacity: number
  ) {
    this.times = new Float64Array(capacity).fill(Infinity);
    this.unwrapped = new Float64Array(capacity);
  }

  join(member: IBinned): void {
    this.members.add(member);
  }

  /** Create a mark that records the first changed bin. */
  mark(): IMark {
    const mark = { from: 0 };
    this.marks.add(mark);
    return mark;
  }

  unmark(mark: IMark): void {
    this.marks.delete(mark);
  }

  /** Mark the bins from `bin` on as changed. */
  touch(bin: number): void {
    for (const mark of this.marks) {
      mark.from = Math.min(mark.from, bin);
    }
  }

  /** Return the bin of a place. Grows the grid if necessary. */
  place(x: number): number {
    if (this.length === 0) {
      this.origin = Math.floor(x);
    }
    let bin = this.binOf(x);
    if (bin < 0 || bin >= this.capacity) {
      this.reframe(x);
      bin = this.binOf(x);
    }
    this.length = Math.max(this.length, bin + 1);
    this.first = Math.min(this.first, x);
    this.last = Math.max(this.last, x);
    return bin;
  }

  /** Discard data beyond a place. Keeps the bin that contains the place. */
  cut(x: number): void {
    const length = Math.min(this.length, Math.max(0, this.binOf(x) + 1));
    for (const member of this.members) {
      member.cut(length, x);
    }
    this.times.fill(Infinity, length);
    this.touch(length);
    this.length = length;
    this.first = length > 0 ? this.first : Infinity;
    this.last = length > 0 ? Math.min(this.last, x) : -Infinity;
  }

  /** Record a row of bin `bin`, made `time` seconds after the run started. */
  clock(bin: number, time: number): void {
    if (time < this.times[bin]!) {
      this.times[bin] = time;
    }
  }

  /** Return the bin index of a place. May be negative or beyond the last bin. */
  binOf(x: number): number {
    return Math.floor((x - this.origin) / this.stride);
  }

  /** Return the first place of a bin. */
  at(bin: number): number {
    return this.origin + bin * this.stride;
  }

  /** Return the start of each bin in seconds. Never decreases, even if clocks were set. */
  seconds(): Float64Array {
    let before = 0;
    let offset = 0;
    for (let i = 0; i < this.length; i++) {
      const time = this.times[i]! + offset;
      if (time < before - CLOCK_SET_S) {
        offset += before - time;
      } else if (time < Infinity) {
        before = Math.max(before, time);
      }
      this.unwrapped[i] = before;
    }
    return this.unwrapped;
  }

  private reframe(x: number): void {
    const low = Math.min(this.origin, Math.floor(x));
    const high = Math.max(this.at(this.length) - 1, x);
    let stride = this.stride;
    while (Math.floor(high / stride) - Math.floor(low / stride) >= this.capacity) {
      stride *= 2;
    }
    this.moveTo(this.originBelow(low, high, stride), stride);
  }

  private originBelow(low: number, high: number, stride: number): number {
    const first = Math.floor(low / stride);
    if (low === this.origin) {
      return first * stride;
    }
    const spare = this.capacity - 1 - (Math.floor(high / stride) - first);
    const room = Math.min(spare, Math.floor(this.capacity / ROOM_BELOW));
    return Math.max(Math.min(first, 0), first - room) * stride;
  }

  private moveTo(origin: number, stride: number): void {
    const before = { origin: this.origin, stride: this.stride };
    const to = (bin: number): number =>
      Math.floor((before.origin + bin * before.stride - origin) / stride);
    const times = new Float64Array(this.capacity).fill(Infinity);
    for (let i = 0; i < this.length; i++) {
      const bin = to(i);
      times[bin] = Math.min(times[bin]!, this.times[i]!);
    }
    for (const member of this.members) {
      member.move({ to });
    }
    this.length = this.length === 0 ? 0 : to(this.length - 1) + 1;
    this.origin = origin;
    this.stride = stride;
    this.times = times;
    this.touch(0);
  }
}
