import type { ITimeline, LaneKind } from '../records';

/** Device number of the lanes of a host. */
const HOST = -1;

/** Busy times of one lane in microseconds after the begin of the timeline. */
export interface ILane {
  readonly name: string;
  readonly kind: LaneKind;
  readonly begins: Float64Array;
  readonly ends: Float64Array;
  /** Index of the operation of each span. */
  readonly names: readonly number[];
}

/** Return the lanes of a timeline with absolute times. */
export function lanesOf(timeline: ITimeline): ILane[] {
  return timeline.lanes.map(({ rank, device, kind, gaps_us, lengths_us, names }) => {
    const begins = new Float64Array(gaps_us.length);
    const ends = new Float64Array(gaps_us.length);
    let at = 0;
    gaps_us.forEach((gap, i) => {
      begins[i] = at + gap;
      at = ends[i] = begins[i] + (lengths_us[i] ?? 0);
    });
    const place = device === HOST ? 'host' : `device ${device}`;
    return { name: `rank ${rank} · ${place} · ${kind}`, kind, begins, ends, names };
  });
}

/** Return the end of the last span. */
export function endOf(lanes: readonly ILane[]): number {
  return lanes.reduce((last, { ends }) => Math.max(last, ends[ends.length - 1] ?? 0), 0);
}

/** Return the index of the first span that ends after a time. */
export function firstAfter({ ends }: ILane, time: number): number {
  let [low, high] = [0, ends.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    [low, high] = ends[middle]! > time ? [low, middle] : [middle + 1, high];
  }
  return low;
}

/** Return the span at a time, or the nearest one within `near`. -1 if all are farther. */
export function spanAt(lane: ILane, time: number, near: number): number {
  const i = firstAfter(lane, time - near);
  return i < lane.ends.length && lane.begins[i]! <= time + near ? i : -1;
}
