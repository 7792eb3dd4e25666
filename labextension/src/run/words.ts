import type { IRecoveryRecord } from '../records';

/** Translate a text of the view. */
export type Translate = (text: string) => string;

/** Unit of a number. Determines its format. */
export type Unit = 'number' | 'short' | 'seconds' | 'bytes' | 'bytes/s' | 'share';

const DIGITS = 4;
const COUNT = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const WHOLE = new Intl.NumberFormat(undefined, { maximumSignificantDigits: DIGITS });
const PLAIN = digits(DIGITS);
const SHORT = digits(3);
const THREE = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });

/** Return a format with a fixed number of significant digits, to align numbers in columns. */
function digits(number: number): Intl.NumberFormat {
  const options = { minimumSignificantDigits: number, maximumSignificantDigits: number };
  return new Intl.NumberFormat(undefined, options);
}

/** Fill the placeholders of a text such as `step {0} of {1}`. */
export function fill(text: string, ...values: readonly (string | number)[]): string {
  return text.replace(/\{(\d)\}/g, (_, place: string) => String(values[Number(place)] ?? ''));
}

/** Return the text for a run that the server cannot read. */
export function refusal(reason: string, translate: Translate): string {
  const text =
    'nbdist cannot show this run: {0}. Open it with that version, or delete its directory.';
  return fill(translate(text), reason);
}

/** Format a whole number: `1,234`. */
export function count(value: number): string {
  return COUNT.format(value);
}

/** Format a count, as in `1 worker` or `1,200 workers`. Both texts contain `{0}`. */
export function counted(value: number, one: string, several: string): string {
  return fill(value === 1 ? one : several, count(value));
}

/** Format a number: `0.4127`, `2.31e-9`, `nan`, `∞`. */
export function plain(value: number): string {
  if (Number.isNaN(value)) {
    return 'nan';
  }
  if (!Number.isFinite(value)) {
    return value > 0 ? '∞' : '−∞';
  }
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) {
    return value.toExponential(DIGITS - 2);
  }
  return (Number.isInteger(value) ? WHOLE : PLAIN).format(value);
}

interface IScale {
  readonly factor: number;
  readonly suffix: string;
}

const SECONDS: readonly IScale[] = [
  { factor: 1, suffix: ' s' },
  { factor: 1e3, suffix: ' ms' },
  { factor: 1e6, suffix: ' µs' }
];
const BYTES: readonly IScale[] = [
  { factor: 1024 ** -4, suffix: ' TiB' },
  { factor: 1024 ** -3, suffix: ' GiB' },
  { factor: 1024 ** -2, suffix: ' MiB' },
  { factor: 1024 ** -1, suffix: ' KiB' },
  { factor: 1, suffix: ' B' }
];
/** Decimal scales, as networks and disks are specified. */
const BYTES_PER_SECOND: readonly IScale[] = [
  { factor: 1e-12, suffix: ' TB/s' },
  { factor: 1e-9, suffix: ' GB/s' },
  { factor: 1e-6, suffix: ' MB/s' },
  { factor: 1e-3, suffix: ' kB/s' },
  { factor: 1, suffix: ' B/s' }
];
const SCALES: Partial<Record<Unit, readonly IScale[]>> = {
  seconds: SECONDS,
  bytes: BYTES,
  'bytes/s': BYTES_PER_SECOND
};
const LARGE: readonly IScale[] = [
  { factor: 1e-9, suffix: 'G' },
  { factor: 1e-6, suffix: 'M' },
  { factor: 1e-3, suffix: 'k' }
];
const NO_SCALE: IScale = { factor: 1, suffix: '' };

/** Return the scale for values of this size. */
function scaleOf(unit: Unit, size: number): IScale {
  if (unit === 'share') {
    return { factor: 100, suffix: ' %' };
  }
  const scales = SCALES[unit] ?? [];
  const fitting = scales.find(scale => size * scale.factor >= 1);
  const least = size === 0 ? scales[0] : scales[scales.length - 1];
  return fitting ?? least ?? NO_SCALE;
}

/** Format a value with its unit: `12.3 ms`, `1.44 GiB`, `23 %`, `0.4127`. */
export function amount(value: number, unit: Unit): string {
  if (unit === 'number' || !Number.isFinite(value)) {
    return plain(value);
  }
  if (unit === 'seconds') {
    return duration(value);
  }
  const { factor, suffix } = scaleOf(unit, Math.abs(value));
  if (value === 0) {
    return `0${suffix}`;
  }
  return SHORT.format(value * factor) + suffix;
}

/** Format axis ticks that are `increment` apart, all in one scale. */
export function ticks(values: readonly number[], unit: Unit, increment: number): string[] {
  const size = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  if (unit === 'number' && size !== 0 && (size >= 1e12 || size < 1e-4)) {
    return values.map(value => (value === 0 ? '0' : value.toExponential(1)));
  }
  const large = size >= 1e4 ? LARGE.find(scale => size * scale.factor >= 1) : undefined;
  const scale = unit === 'number' ? (large ?? NO_SCALE) : scaleOf(unit, size);
  const step = increment * scale.factor;
  const digits = Math.min(10, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  const isHalf = Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6;
  const format = fractions(digits + (isHalf ? 1 : 0));
  return values.map(value =>
    value === 0 ? '0' : format.format(value * scale.factor) + scale.suffix
  );
}

const FRACTIONS = new Map<number, Intl.NumberFormat>();

/** Return a cached format with a fixed number of decimals: to construct one is slow. */
function fractions(number: number): Intl.NumberFormat {
  let format = FRACTIONS.get(number);
  if (format === undefined) {
    const options = { minimumFractionDigits: number, maximumFractionDigits: number };
    format = new Intl.NumberFormat(undefined, options);
    FRACTIONS.set(number, format);
  }
  return format;
}

/**
 * Format seconds: `85 µs`, `3.1 ms`, `16.6 s`, `3 min 05 s`, `2 h 07 min`.
 *
 * Python has the same function in `nbdist/views/formatting.py`.
 */
export function duration(seconds: number): string {
  if (seconds < 0) {
    return `-${duration(-seconds)}`;
  }
  if (seconds < 59.95) {
    const [factor, unit] =
      seconds === 0 || seconds >= 0.9995
        ? [1, 's']
        : seconds >= 0.9995e-3
          ? [1e3, 'ms']
          : [1e6, 'µs'];
    return `${THREE.format(seconds * factor)} ${unit}`;
  }
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  const two = (value: number): string => String(value).padStart(2, '0');
  return minutes < 60
    ? `${minutes} min ${two(whole % 60)} s`
    : `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}

/** Format a recovery: `recovered: rank 2 died after step 73, resumed after step 50, 1.4 s lost`. */
export function recovered(
  { reason, step, lost_s: lost, workers }: IRecoveryRecord,
  translate: Translate
): string {
  const [what] = reason.split('\n', 1);
  const left = workers === 1 ? translate(' with {0} worker') : translate(' with {0} workers');
  const fewer = workers > 0 ? fill(left, count(workers)) : '';
  const text =
    step > 0
      ? translate('recovered: {0}, resumed after step {1}{3}, {2} lost')
      : translate('recovered: {0}, restarted{3}, {2} lost');
  return fill(text, what!, count(step), duration(lost), fewer);
}

/** Format ranks as ranges: `0, 2–4` for 0, 2, 3, 4. */
export function ranks(numbers: readonly number[]): string {
  const spans: [number, number][] = [];
  for (const rank of [...numbers].sort((a, b) => a - b)) {
    const last = spans[spans.length - 1];
    if (last !== undefined && rank === last[1] + 1) {
      last[1] = rank;
    } else {
      spans.push([rank, rank]);
    }
  }
  return spans
    .map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`))
    .join(', ');
}
