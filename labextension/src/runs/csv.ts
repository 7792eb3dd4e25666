import type { IRunRow } from '../records';
import type { IColumn, Value } from './columns';

/** Return the runs as CSV (RFC 4180): one line for each run, times in ISO 8601 and seconds. */
export function csv(rows: readonly IRunRow[], columns: readonly IColumn[]): string {
  const others = columns.filter(({ key }) => key !== 'id'); // that column has the short form
  const header = ['id', ...others.map(column => column.key)];
  const lines = rows.map(row => [row.state.id, ...others.map(column => plainValue(column, row))]);
  return [header, ...lines].map(line => `${line.map(field).join(',')}\r\n`).join('');
}

function plainValue(column: IColumn, row: IRunRow): Value {
  return column.key === 'started'
    ? new Date(1000 * row.state.began).toISOString()
    : column.value(row);
}

function field(value: Value): string {
  const text = String(value ?? '');
  return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}
