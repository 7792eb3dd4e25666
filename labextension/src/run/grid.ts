/** What rows are counted by: their steps, their epochs, or (with neither) themselves. */
export type Axis = 'step' | 'epoch' | 'report';

/** How the bins of a grid changed: bin `i` became bin `to(i)`. */
export interface IMove {
  readonly to: (bin: number) => number;
}

/** Whatever keeps values in the bins of a grid. */
export interface IBinned {
  move(move: IMove): void;
  /** The bins from `length` on are empty again: there is nothing beyond `place`. */
  cut(length: number, place: number): void;
}

/** From which bin on a reader has to look again. */
export interface IMark {
  from: number;
}

/** A clock that goes back by more than this was set; by less, it is the ranks' that differ. */
const CLOCK_SET_S = 1;

/** How much room is left below when a place before the first one is met: a part of all bins. */
const ROOM_BELOW = 8;

/**
 * Bins over one axis, alike for all ranks and metrics.
 *
 * Each bin holds `stride` places; when there are more than `capacity` bins the stride doubles: what
 * is kept is bounded, however long the run is, and its shape stays.
 */
export class Grid {
  /** The first place of bin 0. */
  origin = 0;
  /** Places in a bin. */
  stride = 1;
  /** Bins in use. */
  length = 0;
  /** The least and the greatest place that was met. */
  first = Infinity;
  last = -Infinity;

  private readonly members = new Set<IBinned>();
  private readonly marks = new Set<IMark>();
  /** When each bin was begun, seconds; infinite where nobody said. */
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

  /** A mark that goes down to each bin that changes. */
  mark(): IMark {
    const mark = { from: 0 };
    this.marks.add(mark);
    return mark;
  }

  unmark(mark: IMark): void {
    this.marks.delete(mark);
  }

  /** Bins from `bin` on have changed. */
  touch(bin: number): void {
    for (const mark of this.marks) {
      mark.from = Math.min(mark.from, bin);
    }
  }

  /** The bin of a place; makes room for it. */
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

  /** Forget what is beyond a place; of the bin that it is in, whose places are one, nothing. */
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

  /** A row of bin `bin` was made `time` seconds after the run began. */
  clock(bin: number, time: number): void {
    if (time < this.times[bin]!) {
      this.times[bin] = time;
    }
  }

  /** The bin that a place is in, if it is in any: it may be negative, or beyond all. */
  binOf(x: number): number {
    return Math.floor((x - this.origin) / this.stride);
  }

  /** The first place of a bin. */
  at(bin: number): number {
    return this.origin + bin * this.stride;
  }

  /** Seconds at which each bin began: never falling, whatever the clocks did. */
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
