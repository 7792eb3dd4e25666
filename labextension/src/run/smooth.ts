import type { ITrace } from './series';

/**
 * Compute an exponential moving average without initial bias.
 *
 * A bin of `n` values counts as `n` values equal to its mean. Bins without a value stay NaN.
 *
 * Args:
 *   weight: weight of earlier values, in 0..1. With 0 the line is unchanged.
 *   out: result, of length at least `trace.length`.
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
