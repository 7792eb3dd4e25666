/** Range of an axis. */
export interface ISpan {
  readonly min: number;
  readonly max: number;
}

/** Smallest visible fraction of the whole span. */
const FINEST = 1e-4;

/** Scale the span by `factor` around `centre` within `whole`. Null means all of it. */
export function zoomed(span: ISpan, whole: ISpan, factor: number, centre: number): ISpan | null {
  const finest = (whole.max - whole.min) * FINEST;
  const length = Math.max(finest, (span.max - span.min) * factor);
  if (length >= whole.max - whole.min) {
    return null;
  }
  const part = (centre - span.min) / (span.max - span.min || 1);
  return within(centre - part * length, length, whole);
}

/** Shift the span by a fraction of its length within `whole`. */
export function panned(span: ISpan, whole: ISpan, part: number): ISpan {
  const length = span.max - span.min;
  return within(span.min + part * length, length, whole);
}

function within(min: number, length: number, whole: ISpan): ISpan {
  const first = Math.max(whole.min, Math.min(min, whole.max - length));
  return { min: first, max: first + length };
}

/** Add a margin for lines to a span. An empty span has a larger margin. */
export function padded(low: number, high: number, isLog: boolean): ISpan {
  if (isLog) {
    const factor = Math.max(1.05, (high / low) ** 0.05);
    return { min: low / factor, max: high * factor };
  }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return { min: low - room, max: high + room };
}
