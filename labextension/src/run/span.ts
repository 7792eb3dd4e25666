/** A stretch of an axis. */
export interface ISpan {
  readonly min: number;
  readonly max: number;
}

/** What is seen is never less than this part of the whole. */
const FINEST = 1e-4;

/** The span made `factor` times as long about `centre`, inside of `whole`; null is all of it. */
export function zoomed(span: ISpan, whole: ISpan, factor: number, centre: number): ISpan | null {
  const finest = (whole.max - whole.min) * FINEST;
  const length = Math.max(finest, (span.max - span.min) * factor);
  if (length >= whole.max - whole.min) {
    return null;
  }
  const part = (centre - span.min) / (span.max - span.min || 1);
  return within(centre - part * length, length, whole);
}

/** The span moved by a part of its length, kept inside of `whole`. */
export function panned(span: ISpan, whole: ISpan, part: number): ISpan {
  const length = span.max - span.min;
  return within(span.min + part * length, length, whole);
}

function within(min: number, length: number, whole: ISpan): ISpan {
  const first = Math.max(whole.min, Math.min(min, whole.max - length));
  return { min: first, max: first + length };
}

/** The span with room around it for lines: a part of its length, more where it has none. */
export function padded(low: number, high: number, isLog: boolean): ISpan {
  if (isLog) {
    const factor = Math.max(1.05, (high / low) ** 0.05);
    return { min: low / factor, max: high * factor };
  }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return { min: low - room, max: high + room };
}
