import type { IRunRow } from '../records';
import type { IColumn, Value } from './columns';

/** Filter, order and groups of the table. */
export interface IQuery {
  /** Words, and conditions such as `loss<0.5` or `tag=baseline`. All must hold. */
  readonly search: string;
  /** Status. Empty for all. */
  readonly status: string;
  /** Tag. Empty for all. */
  readonly tag: string;
  /** Key of the column that orders the runs. */
  readonly sort: string;
  readonly isDescending: boolean;
  readonly isGrouped: boolean;
}

/** Line of the table: a run, or the heading of a group of runs. */
export type Line =
  | { readonly kind: 'run'; readonly row: IRunRow; readonly group: string }
  | { readonly kind: 'group'; readonly tag: string; readonly runs: number };

type Test = (row: IRunRow) => boolean;

const CONDITION = /^(.+?)(<=|>=|!=|<|>|=)(.+)$/;

/** Return the runs that match the filter, pinned ones first. */
export function found(
  rows: readonly IRunRow[],
  columns: readonly IColumn[],
  query: IQuery
): readonly IRunRow[] {
  const tests = query.search
    .split(/\s+/)
    .filter(word => word !== '')
    .map(word => test(word, columns));
  const matches = rows.filter(
    row =>
      (query.status === '' || row.state.status === query.status) &&
      (query.tag === '' || row.annotations.tags.includes(query.tag)) &&
      tests.every(holds => holds(row))
  );
  const column = columns.find(({ key }) => key === query.sort);
  const sign = query.isDescending ? -1 : 1;
  return matches.sort(
    (a, b) =>
      Number(b.annotations.pinned) - Number(a.annotations.pinned) ||
      (column === undefined ? 0 : compare(column.value(a), column.value(b), sign)) ||
      b.state.began - a.state.began
  );
}

/** Return the lines of the table. A run with several tags is in several groups. */
export function lines(
  rows: readonly IRunRow[],
  isGrouped: boolean,
  collapsed: ReadonlySet<string>
): readonly Line[] {
  if (!isGrouped) {
    return rows.map(row => ({ kind: 'run', row, group: '' }));
  }
  return tagsOf(rows, '').flatMap((tag): readonly Line[] => {
    const own = rows.filter(({ annotations: { tags } }) =>
      tag === '' ? tags.length === 0 : tags.includes(tag)
    );
    const runs = own.map((row): Line => ({ kind: 'run', row, group: tag }));
    const heading: Line = { kind: 'group', tag, runs: own.length };
    return own.length === 0 ? [] : [heading, ...(collapsed.has(tag) ? [] : runs)];
  });
}

/** Return all tags in order, then `others`. */
export function tagsOf(rows: readonly IRunRow[], ...others: readonly string[]): readonly string[] {
  const tags = new Set(rows.flatMap(row => row.annotations.tags));
  return [...[...tags].sort((a, b) => a.localeCompare(b)), ...others];
}

/**
 * Return the test of a word: a condition on a known column, else a part of a text of the run.
 *
 * A name may be that of a metric and of a hyperparameter. One of them must hold.
 */
function test(word: string, columns: readonly IColumn[]): Test {
  const [, key = '', operator = '', wanted = ''] = CONDITION.exec(word) ?? [];
  const keys = [key, `hyperparameters.${key}`].map(one => one.toLowerCase());
  const chosen = columns.filter(one => keys.includes(one.key.toLowerCase()));
  if (chosen.length > 0) {
    return row => chosen.some(column => holds(column.value(row), operator, wanted));
  }
  const part = word.toLowerCase();
  return row => textOf(row, columns).includes(part);
}

function textOf(row: IRunRow, columns: readonly IColumn[]): string {
  const { id, header, error } = row.state;
  const texts = columns.filter(column => !column.isNumber).map(column => column.text(row));
  return [id, header, error, ...texts].join('\n').toLowerCase();
}

function holds(value: Value, operator: string, wanted: string): boolean {
  const order = value === null ? NaN : compareWith(value, wanted);
  switch (operator) {
    case '<':
      return order < 0;
    case '<=':
      return order <= 0;
    case '>':
      return order > 0;
    case '>=':
      return order >= 0;
    case '!=':
      return !isEqual(value, wanted, order);
    default:
      return isEqual(value, wanted, order);
  }
}

/** Return true for an equal value. A list of texts contains the wanted one. */
function isEqual(value: Value, wanted: string, order: number): boolean {
  const parts = typeof value === 'string' ? value.toLowerCase().split(', ') : [];
  return order === 0 || parts.includes(wanted.toLowerCase());
}

/** Return the sign of the difference. NaN if a number is compared with a text. */
function compareWith(value: string | number, wanted: string): number {
  return typeof value === 'number'
    ? Math.sign(value - Number(wanted))
    : Math.sign(value.localeCompare(wanted, undefined, { sensitivity: 'base' }));
}

/** Order numbers before texts. Missing values are last in both directions. */
function compare(a: Value, b: Value, sign: number): number {
  if (a === null || b === null) {
    return Number(a === null) - Number(b === null);
  }
  if (typeof a === 'number' && typeof b === 'number') {
    return sign * (a - b);
  }
  if (typeof a === 'string' && typeof b === 'string') {
    return sign * a.localeCompare(b, undefined, { numeric: true });
  }
  return typeof a === 'number' ? -1 : 1;
}
