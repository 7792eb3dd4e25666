import type { IRecoveryRecord } from '../records';
import { MEDIAN, QUANTILES } from './bands';
import type { Strip } from './decimate';
import type { Axis } from './grid';
import type { IEntry } from './legend';
import type { Picture, ISettings } from './picture';
import type { Translate } from './words';
import { amount, count, counted, duration, fill, recovered, ranks as spans } from './words';

const AXES: Record<Axis, string> = {
  step: 'step',
  epoch: 'epoch',
  report: 'report',
  second: 'second'
};

/** Format a position on the x axis: `step 1,234` or `1 min 05 s`. */
export function place(x: number, axis: Axis, settings: ISettings, translate: Translate): string {
  return settings.x === 'time' ? duration(x) : `${translate(AXES[axis])} ${count(x)}`;
}

/** Return the value of a strip in a column, or the latest value for column -1. */
export function valueOf(strip: Strip, column: number): number {
  if (column >= 0) {
    return strip.mean[column] ?? NaN;
  }
  if (!Number.isNaN(strip.latest)) {
    return strip.latest;
  }
  for (let i = strip.columns - 1; i >= 0; i--) {
    if (strip.mean[i] === strip.mean[i] || strip.bad[i]) {
      return strip.mean[i]!;
    }
  }
  return NaN;
}

/** Return the legend entries at a column of the picture, or the latest values for column -1. */
export function entries(picture: Picture, column: number, translate: Translate): IEntry[] {
  const { source, whole, lines, bands } = picture;
  const write = (strip: Strip): string => {
    const value = valueOf(strip, column);
    return Number.isNaN(value) && !hasBad(strip, column) ? '–' : amount(value, source.unit);
  };
  const all: IEntry[] = [];
  if (whole !== null) {
    all.push({
      rank: null,
      label: translate(source.wholeName),
      value: write(whole),
      kind: 'whole'
    });
  }
  if (bands !== null) {
    all.push(...bandEntries(bands.strips.map(write), translate));
  }
  for (const { rank, strip } of lines) {
    const label = `${translate('rank')} ${rank}`;
    all.push({
      rank,
      label: named(label, source.lineName, translate),
      value: write(strip),
      kind: 'line'
    });
  }
  if (source.limit > 0) {
    const value = amount(source.limit, source.unit);
    all.push({ rank: null, label: translate('high above'), value, kind: 'limit' });
  }
  return all;
}

function named(label: string, what: string, translate: Translate): string {
  return what === '' ? label : `${translate(what)}, ${label}`;
}

function hasBad(strip: Strip, column: number): boolean {
  const at = column >= 0 ? column : strip.columns - 1;
  return (strip.bad[at] ?? 0) !== 0;
}

function bandEntries(values: readonly string[], translate: Translate): IEntry[] {
  const span = (low: number, high: number): string =>
    `${values[low] ?? ''} – ${values[high] ?? ''}`;
  const last = QUANTILES.length - 1;
  return [
    { rank: null, label: translate('median'), value: values[MEDIAN] ?? '', kind: 'whole' },
    {
      rank: null,
      label: translate('middle 50 %'),
      value: span(2, last - 2),
      kind: 'band',
      strength: 0.6
    },
    {
      rank: null,
      label: translate('middle 80 %'),
      value: span(1, last - 1),
      kind: 'band',
      strength: 0.35
    },
    { rank: null, label: translate('all'), value: span(0, last), kind: 'band', strength: 0.18 }
  ];
}

/** Describe a chart in words, for screen readers. */
export function describe(
  picture: Picture,
  settings: ISettings,
  recoveries: readonly IRecoveryRecord[],
  translate: Translate
): string {
  const { source, ranks, all } = picture;
  const at = (x: number): string => place(x, source.grid.axis, settings, translate);
  const who = counted(ranks.length, translate('{0} rank'), translate('{0} ranks'));
  const parts = [
    ranks.length > 0
      ? fill(
          translate('Chart of {0}, {1}, from {2} to {3}.'),
          source.title,
          who,
          at(all.min),
          at(all.max)
        )
      : fill(translate('Chart of {0}, from {1} to {2}.'), source.title, at(all.min), at(all.max))
  ];
  const middle = picture.whole ?? picture.bands?.strips[MEDIAN] ?? picture.lines[0]?.strip;
  if (middle !== undefined) {
    parts.push(fill(translate('Latest: {0}.'), amount(valueOf(middle, -1), source.unit)));
  }
  parts.push(...extremes(picture, translate), ...holes(picture, at, translate));
  if (recoveries.length > 0) {
    const times = counted(
      recoveries.length,
      translate('Recovered once'),
      translate('Recovered {0} times')
    );
    parts.push(
      `${times}; ${translate('latest')}: ${recovered(recoveries[recoveries.length - 1]!, translate)}.`
    );
  }
  return parts.join(' ');
}

function extremes({ lines, bands, source }: Picture, translate: Translate): string[] {
  const latest = lines
    .map(({ rank, strip }) => ({ rank, value: valueOf(strip, -1) }))
    .filter(({ value }) => !Number.isNaN(value))
    .sort((a, b) => a.value - b.value);
  const [first, last] = [latest[0], latest[latest.length - 1]];
  if (first !== undefined && bands !== null) {
    return [fill(translate('Outliers: rank {0}.'), spans(latest.map(({ rank }) => rank)))];
  }
  if (first === undefined || last === undefined || first === last) {
    return [];
  }
  const write = (value: number): string => amount(value, source.unit);
  const text = translate('Minimum: {0} on rank {1}. Maximum: {2} on rank {3}.');
  return [fill(text, write(first.value), first.rank, write(last.value), last.rank)];
}

function holes(picture: Picture, at: (x: number) => string, translate: Translate): string[] {
  const strips = [
    ...picture.lines.map(line => line.strip),
    ...(picture.whole ? [picture.whole] : [])
  ];
  const isHole = (column: number): boolean => strips.some(strip => strip.bad[column] !== 0);
  for (let column = 0; column < picture.columns; column++) {
    if (isHole(column)) {
      return [fill(translate('Not finite, first near {0}.'), at(picture.x[column]!))];
    }
  }
  return [];
}
