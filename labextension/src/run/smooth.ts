import type { ITrace } from './series';

/**
 * An exponential mean along a line, without the bias of its first values.
 *
 * A bin of `n` values counts as `n` values that are all its mean; bins without a value stay nan.
 *
 * Args:
 *   weight: of what was before, in 0..1; 0 leaves the line as it is.
 *   out: at least `trace.length` long.
 */
export function smooth(trace: ITrace, weight: number, out: Float32Array): void {
  let sum = 0;
  let total = 0;
  let keep = weight;
  let keepFor = 1;
  for (let i = 0; i < trace.length; i++) {
    const n = trace.n[i]!;
    if (n === 0) {
      out[i] = NaN;
      continue;
    }
    if (n !== keepFor) {
      keep = weight ** n;
      keepFor = n;
    }
    sum = keep * sum + (1 - keep) * trace.mean[i]!;
    total = keep * total + (1 - keep);
    out[i] = sum / total;
  }
}
