import type { TranslationBundle } from '@jupyterlab/translation';
import { moment, runTitle, shortId, statusName } from '../panel/words';
import type { IRunRow } from '../records';
import { count, duration, plain } from '../run/words';

/** Key of the column of the batch, and name of numbers of cells. */
const BATCH = 'batch';

/** Value of a cell, for sorting and filters. Null if it is missing. */
export type Value = string | number | null;

/** Column of the table of runs. */
export interface IColumn {
  /** Name in filters and exports. */
  readonly key: string;
  readonly title: string;
  readonly group: 'run' | 'metric' | 'hyperparameter';
  readonly isNumber: boolean;
  value(row: IRunRow): Value;
  text(row: IRunRow): string;
}

/** Return the name that the user has given to a run, else its default name. */
export function nameOf(row: IRunRow, trans: TranslationBundle): string {
  return row.annotations.name === '' ? runTitle(row.state, trans) : row.annotations.name;
}

/** Return the columns of these runs: those of every run, metrics, hyperparameters. */
export function columnsOf(rows: readonly IRunRow[], trans: TranslationBundle): readonly IColumn[] {
  const metrics = names(rows, row => row.metrics);
  const sources = batchSources(rows);
  const hyperparameters = names(rows, row => row.state.hyperparameters);
  const others = hyperparameters.filter(name => !sources.includes(name));
  const taken = [...metrics, BATCH];
  return [
    ...runColumns(trans),
    ...metrics.map(name => metric(name)),
    batch(sources, trans),
    ...others.map(name =>
      hyperparameter(name, taken.includes(name) ? `hyperparameters.${name}` : name, rows)
    )
  ].filter(column => column.group === 'run' || rows.some(row => column.value(row) !== null));
}

function runColumns(trans: TranslationBundle): readonly IColumn[] {
  const text = (key: string, title: string, value: (row: IRunRow) => string): IColumn => ({
    ...{ key, title, group: 'run', isNumber: false, value },
    text: value
  });
  const number = (
    key: string,
    title: string,
    value: (row: IRunRow) => number | null,
    format: (value: number) => string
  ): IColumn => ({
    ...{ key, title, group: 'run', isNumber: true, value },
    text: row => formatted(value(row), format)
  });
  return [
    text('name', trans.__('Name'), row => nameOf(row, trans)),
    text('id', trans.__('Id'), row => shortId(row.state)),
    text('status', trans.__('Status'), row => statusName(row.state, trans)),
    number('started', trans.__('Started'), row => row.state.began, moment),
    number('duration', trans.__('Duration'), seconds, duration),
    text('tag', trans.__('Tags'), row => row.annotations.tags.join(', ')),
    text('note', trans.__('Note'), row => row.annotations.note),
    number('workers', trans.__('Workers'), row => row.ranks, count),
    number('step', trans.__('Step'), row => (row.step < 0 ? null : row.step), count)
  ];
}

function seconds({ state }: IRunRow): number | null {
  return state.ended > 0 ? state.ended - state.began : null;
}

/**
 * Return the hyperparameters that are the batch of a run if its steps have none: the option, and a
 * number of the cell of this name, unless it differs from the batch of the steps.
 */
function batchSources(rows: readonly IRunRow[]): readonly string[] {
  const option = `--${BATCH}`;
  const isSame = rows.every(({ state: { batch: steps, hyperparameters } }) => {
    const found = [steps || null, hyperparameters[option], hyperparameters[BATCH]];
    return new Set(found.filter(isThere)).size < 2;
  });
  return isSame ? [option, BATCH] : [option];
}

function batch(sources: readonly string[], trans: TranslationBundle): IColumn {
  const value = ({ state: { batch: steps, hyperparameters } }: IRunRow): Value =>
    steps > 0 ? steps : (sources.map(name => hyperparameters[name]).find(isThere) ?? null);
  return {
    ...{ key: BATCH, title: trans.__('batch'), group: 'hyperparameter', isNumber: true, value },
    text: row => shown(value(row))
  };
}

function metric(name: string): IColumn {
  const value = (row: IRunRow): Value => row.metrics[name] ?? null;
  return {
    ...{ key: name, title: name, group: 'metric', isNumber: true, value },
    text: row => (name in row.metrics ? plain(row.metrics[name] ?? NaN) : '')
  };
}

function hyperparameter(name: string, key: string, rows: readonly IRunRow[]): IColumn {
  const value = (row: IRunRow): Value => row.state.hyperparameters[name] ?? null;
  const isNumber = rows.every(row => typeof value(row) !== 'string');
  return {
    ...{ key, title: key, group: 'hyperparameter', isNumber, value },
    text: row => shown(value(row))
  };
}

function isThere(value: Value | undefined): boolean {
  return value !== null && value !== undefined;
}

function shown(value: Value): string {
  return typeof value === 'number' ? String(Number(value.toPrecision(6))) : (value ?? '');
}

function formatted(value: number | null, format: (value: number) => string): string {
  return value === null ? '' : format(value);
}

/** Return the names in the records of runs, in the order of their first use. */
function names(
  rows: readonly IRunRow[],
  record: (row: IRunRow) => Readonly<Record<string, unknown>>
): readonly string[] {
  const found = new Set(rows.flatMap(row => Object.keys(record(row))));
  return [...found].sort((a, b) => Number(b === 'loss') - Number(a === 'loss'));
}
