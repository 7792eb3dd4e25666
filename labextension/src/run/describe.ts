import type { IRecoveryRecord } from '../records';
import { MEDIAN, QUANTILES } from './bands';
import type { Strip } from './decimate';
import type { Axis } from './grid';
import type { IEntry } from './legend';
import type { Picture, ISettings } from './picture';
import type { Say } from './words';
import { amount, clock, count, counted, fill, recovered, ranks as spans } from './words';

const AXES: Record<Axis, string> = { step: 'step', epoch: 'epoch', report: 'report' };

/** Format a position on the x axis: `step 1,234` or `1:05`. */
export function place(x: number, axis: Axis, settings: ISettings, say: Say): string {
  return settings.x === 'time' ? clock(x) : `${say(AXES[axis])} ${count(x)}`;
}

/** Return the value of a strip in a column, or the latest value for column -1. */
export function valueOf(strip: Strip, column: number): number {
  if (column >= 0) {
    return strip.mean[column] ?? NaN;
  }
  for (let i = strip.columns - 1; i >= 0; i--) {
    if (strip.mean[i] === strip.mean[i] || strip.bad[i]) {
      return strip.mean[i]!;
    }
  }
  return NaN;
}

/** Return the legend entries at a column of the picture, or the latest values for column -1. */
export function entries(picture: Picture, column: number, say: Say): IEntry[] {
  const { source, whole, lines, bands } = picture;
  const write = (strip: Strip): string => {
    const value = valueOf(strip, column);
    return Number.isNaN(value) && !hasBad(strip, column) ? '–' : amount(value, source.unit);
  };
  const all: IEntry[] = [];
  if (whole !== null) {
    all.push({ rank: null, label: say(source.wholeName), value: write(whole), kind: 'whole' });
  }
  if (bands !== null) {
    all.push(...bandEntries(bands.strips.map(write), say));
  }
  for (const { rank, strip } of lines) {
    const label = `${say('rank')} ${rank}`;
    all.push({
      rank,
      label: named(label, source.lineName, say),
      value: write(strip),
      kind: 'line'
    });
  }
  if (source.limit > 0) {
    const value = amount(source.limit, source.unit);
    all.push({ rank: null, label: say('high above'), value, kind: 'limit' });
  }
  return all;
}

function named(label: string, what: string, say: Say): string {
  return what === '' ? label : `${say(what)}, ${label}`;
}

function hasBad(strip: Strip, column: number): boolean {
  const at = column >= 0 ? column : strip.columns - 1;
  return (strip.bad[at] ?? 0) !== 0;
}

function bandEntries(values: readonly string[], say: Say): IEntry[] {
  const span = (low: number, high: number): string =>
    `${values[low] ?? ''} – ${values[high] ?? ''}`;
  const last = QUANTILES.length - 1;
  return [
    { rank: null, label: say('median'), value: values[MEDIAN] ?? '', kind: 'whole' },
    {
      rank: null,
      label: say('middle 50 %'),
      value: span(2, last - 2),
      kind: 'band',
      strength: 0.6
    },
    {
      rank: null,
      label: say('middle 80 %'),
      value: span(1, last - 1),
      kind: 'band',
      strength: 0.35
    },
    { rank: null, label: say('all'), value: span(0, last), kind: 'band', strength: 0.18 }
  ];
}

/** Describe a chart in words, for screen readers. */
export function describe(
  picture: Picture,
  settings: ISettings,
  recoveries: readonly IRecoveryRecord[],
  say: Say
): string {
  const { source, ranks, all } = picture;
  const at = (x: number): string => place(x, source.grid.axis, settings, say);
  const who = counted(ranks.length, say('{0} rank'), say('{0} ranks'));
  const parts = [
    ranks.length > 0
      ? fill(
          say('Chart of {0}, {1}, from {2} to {3}.'),
          source.title,
          who,
          at(all.min),
          at(all.max)
        )
      : fill(say('Chart of {0}, from {1} to {2}.'), source.title, at(all.min), at(all.max))
  ];
  const middle = picture.whole ?? picture.bands?.strips[MEDIAN] ?? picture.lines[0]?.strip;
  if (middle !== undefined) {
    parts.push(fill(say('Latest: {0}.'), amount(valueOf(middle, -1), source.unit)));
  }
  parts.push(...extremes(picture, say), ...holes(picture, at, say));
  if (recoveries.length > 0) {
    const times = counted(recoveries.length, say('Recovered once'), say('Recovered {0} times'));
    parts.push(
      `${times}; ${say('latest')}: ${recovered(recoveries[recoveries.length - 1]!, say)}.`
    );
  }
  return parts.join(' ');
}

function extremes({ lines, bands, source }: Picture, say: Say): string[] {
  const latest = lines
    .map(({ rank, strip }) => ({ rank, value: valueOf(strip, -1) }))
    .filter(({ value }) => !Number.isNaN(value))
    .sort((a, b) => a.value - b.value);
  const [first, last] = [latest[0], latest[latest.length - 1]];
  if (first !== undefined && bands !== null) {
    return [fill(say('Outliers: rank {0}.'), spans(latest.map(({ rank }) => rank)))];
  }
  if (first === undefined || last === undefined || first === last) {
    return [];
  }
  const write = (value: number): string => amount(value, source.unit);
  const text = say('Minimum: {0} on rank {1}. Maximum: {2} on rank {3}.');
  return [fill(text, write(first.value), first.rank, write(last.value), last.rank)];
}

function holes(picture: Picture, at: (x: number) => string, say: Say): string[] {
  const strips = [
    ...picture.lines.map(line => line.strip),
    ...(picture.whole ? [picture.whole] : [])
  ];
  const isHole = (column: number): boolean => strips.some(strip => strip.bad[column] !== 0);
  for (let column = 0; column < picture.columns; column++) {
    if (isHole(column)) {
      return [fill(say('Not finite, first near {0}.'), at(picture.x[column]!))];
    }
  }
  return [];
}
