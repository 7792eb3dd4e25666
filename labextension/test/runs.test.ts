import assert from 'node:assert/strict';
import { test } from 'node:test';

import { nullTranslator } from '@jupyterlab/translation';
import type { IAnnotations, IRunRow, IRunState } from '../src/records';
import { columnsOf } from '../src/runs/columns';
import { csv } from '../src/runs/csv';
import type { IQuery } from '../src/runs/query';
import { found, lines } from '../src/runs/query';
import { runState } from './states';

const trans = nullTranslator.load('nbdist');
const QUERY: IQuery = {
  ...{ search: '', status: '', tag: '', sort: 'started' },
  ...{ isDescending: true, isGrouped: false }
};

function row(
  id: string,
  metrics: Record<string, number | null> = {},
  annotations: Partial<IAnnotations> = {},
  state: Partial<IRunState> = {}
): IRunRow {
  return {
    state: runState({
      id,
      began: Number(id),
      ended: Number(id) + 60,
      status: 'finished',
      ...state
    }),
    annotations: { name: '', tags: [], note: '', pinned: false, ...annotations },
    ...{ metrics, step: 3, ranks: 2, notebook: '' }
  };
}

const ROWS = [
  row('1', { loss: 0.5 }, { tags: ['a', 'b'] }, { hyperparameters: { lr: 0.1 } }),
  row(
    '2',
    { loss: 0.25, 'top, 5': 1 },
    { name: 'best "one"' },
    { hyperparameters: { lr: 'Cosine' } }
  ),
  row('3', { loss: null }, { tags: ['b'], pinned: true }, { status: 'failed' }),
  row('4', {}, {}, { batch: 64 })
];
const COLUMNS = columnsOf(ROWS, trans);

function ids(query: Partial<IQuery>): string {
  return found(ROWS, COLUMNS, { ...QUERY, ...query })
    .map(({ state }) => state.id)
    .join('');
}

test('the table has columns for metrics and hyperparameters', () => {
  const own = COLUMNS.filter(({ group }) => group !== 'run').map(({ key }) => key);
  assert.deepEqual(own, ['loss', 'top, 5', 'batch', 'lr']);
  assert.equal(COLUMNS.find(({ key }) => key === 'loss')!.text(ROWS[2]!), 'nan');
  assert.deepEqual(
    columnsOf([row('1')], trans).filter(({ group }) => group !== 'run'),
    []
  );
});

test('the batch has one column, from the steps, the option or the cell', () => {
  const given = (batch: number, hyperparameters: Record<string, number | string>): IRunRow =>
    row('1', {}, {}, { batch, hyperparameters });
  const table = (...rows: IRunRow[]): unknown[] =>
    columnsOf(rows, trans)
      .filter(({ group }) => group !== 'run')
      .map(({ key, title, value }) => [key, title, ...rows.map(value)]);
  const own = given(0, { batch: 16 });
  const option = given(0, { '--batch': 32 });
  assert.deepEqual(table(given(64, { '--batch': 64, batch: 64 }), own, option, given(8, {})), [
    ['batch', 'batch', 64, 16, 32, 8]
  ]);
  const other = 'hyperparameters.batch';
  assert.deepEqual(table(given(64, { batch: 8 }), own), [
    ['batch', 'batch', 64, null],
    [other, other, 8, 16]
  ]);
});

test('a name may be that of a metric and of a hyperparameter', () => {
  const rows = [row('1', { lr: 0.3 }), row('2', {}, {}, { hyperparameters: { lr: 0.1 } })];
  const columns = columnsOf(rows, trans);
  const keys = columns.map(({ key }) => key);
  assert.equal(new Set(keys).size, keys.length);
  for (const [search, id] of [
    ['lr<0.2', '2'],
    ['lr>0.2', '1']
  ] as const) {
    const states = found(rows, columns, { ...QUERY, search }).map(({ state }) => state.id);
    assert.deepEqual(states, [id]);
  }
});

test('pinned runs are first, and missing values are last', () => {
  assert.equal(ids({}), '3421');
  assert.equal(ids({ isDescending: false }), '3124');
  assert.equal(ids({ sort: 'loss', isDescending: false }), '3214');
  assert.equal(ids({ sort: 'loss' }), '3124');
  assert.equal(ids({ sort: 'lr' }), '3124');
});

test('words and conditions filter the runs', () => {
  assert.equal(ids({ search: 'BEST' }), '2');
  assert.equal(ids({ search: 'loss<0.4' }), '2');
  assert.equal(ids({ search: 'loss>=0.25 loss!=0.25' }), '1');
  assert.equal(ids({ search: 'tag=b' }), '31');
  assert.equal(ids({ search: 'tag=B lr=0.1' }), '1');
  assert.equal(ids({ search: 'lr=cosine' }), '2');
  assert.equal(ids({ search: 'status=failed' }), '3');
  assert.equal(ids({ search: 'unknown<3' }), '');
  assert.equal(ids({ status: 'failed' }), '3');
  assert.equal(ids({ tag: 'a' }), '1');
});

test('a run is in the group of each of its tags', () => {
  const shown = (collapsed: readonly string[]): string[] =>
    lines(found(ROWS, COLUMNS, QUERY), true, new Set(collapsed)).map(line =>
      line.kind === 'run' ? line.row.state.id : `${line.tag}:${line.runs}`
    );
  assert.deepEqual(shown([]), ['a:1', '1', 'b:2', '3', '1', ':2', '4', '2']);
  assert.deepEqual(shown(['a', 'b']), ['a:1', 'b:2', ':2', '4', '2']);
});

test('an export quotes fields and leaves out missing values', () => {
  const kept = COLUMNS.filter(({ key }) =>
    ['id', 'name', 'started', 'loss', 'top, 5'].includes(key)
  );
  assert.equal(
    csv(ROWS.slice(1, 3), kept),
    'id,name,started,loss,"top, 5"\r\n' +
      '2,"best ""one""",1970-01-01T00:00:02.000Z,0.25,1\r\n' +
      '3,"Cell 1, 20:27",1970-01-01T00:00:03.000Z,,\r\n'
  );
});
