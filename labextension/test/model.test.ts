import assert from 'node:assert/strict';
import { test } from 'node:test';

import type { ITable } from '../src/records';
import { PLACE } from '../src/records';
import { binsFor, RunModel } from '../src/run/model';
import { systemSources } from '../src/worker/system';
import { Random } from './random';
import { recovery, runState } from './states';

function table(own: string[], shared: string[] = [], measures: string[] = [], number = 0): ITable {
  return { number, columns: { measures, own, shared, system: [] } };
}

/** Rows of a table as one message. */
function message(number: number, ...rows: readonly (readonly number[])[]): Float64Array {
  return Float64Array.from([number, ...rows.flat()]);
}

function losses(model: RunModel, rank: number): number[] {
  const series = model.metrics()[0]!.own.get(rank)!;
  return [...series.mean.subarray(0, series.length)];
}

test('rows become a line for each rank', () => {
  const model = new RunModel();
  model.onTable(table(['loss']));
  model.onRows(message(0, [0, 1, 1, 0.1, 3], [1, 1, 1, 0.1, 5], [0, 1, 2, 0.2, 2]));
  assert.deepEqual(losses(model, 0), [3, 2]);
  assert.deepEqual(losses(model, 1), [5]);
  assert.equal(model.metrics()[0]!.latestOfAll(), 3.5);
  assert.deepEqual(model.farthest(), { rank: -1, step: 2, epoch: 1, seconds: 0.2, reports: 0 });
});

test('a table that comes after a longer one does not set a rank back', () => {
  const model = new RunModel();
  model.onTable(table(['loss']));
  model.onTable(table([], [], ['process_bytes'], 1));
  model.onRows(message(0, [0, 1, 8, 0.8, 3], [0, 1, 9, 0.9, 2]));
  model.onRows(message(1, [0, 1, 3, 0.3, 1e6]));
  assert.deepEqual(model.farthest(), { rank: -1, step: 9, epoch: 1, seconds: 0.9, reports: 0 });
  model.onRows(message(0, [0, 1, 1, 1.0, 4])); // a second fit in the same cell
  assert.equal(model.farthest().step, 1);
});

test('a measure that is told late, of an earlier step, does not set a rank back', () => {
  const model = new RunModel();
  model.onTable(table(['loss'], [], ['step_s']));
  model.onTable(table([], [], ['step_s', 'collective_s'], 1));
  model.onRows(message(0, [0, 1, 8, 0.8, 0.1, 3], [0, 1, 9, 0.9, 0.1, 2]));
  model.onRows(message(1, [0, 1, 5, 1.1, 0.1, 0.05]));
  assert.equal(model.farthest().step, 9);
});

test('samples of the hosts are lines by second that change no progress', () => {
  const model = new RunModel();
  const columns = { measures: [], own: [], shared: [], system: ['cpu_cores', 'gpu_watts'] };
  model.onTable({ number: 0, columns });
  model.onRows(message(0, [1, -1, -1, 2.1, 1.5, 90], [1, -1, -1, 4.2, 2.5, 110]));
  assert.deepEqual(model.metrics(), []);
  assert.equal(model.progress(1), undefined);
  const cores = model.system('cpu_cores')!;
  assert.equal(cores.grid.axis, 'second');
  assert.equal(cores.latest(1), 2.5);
  assert.equal(model.system('host_cpu'), undefined);
  const titles = systemSources(model).map(source => source.title);
  assert.deepEqual(titles, ['busy cores of the worker', 'GPU power (W)']);
});

test('a recovery keeps samples of the hosts', () => {
  const model = new RunModel();
  model.onTable({
    number: 0,
    columns: { measures: [], own: [], shared: [], system: ['cpu_cores'] }
  });
  model.onState(runState({}));
  model.onRows(message(0, [0, -1, -1, 9, 1]));
  model.onState(runState({ heals: [recovery(3, 20)] }));
  model.onRows(message(0, [0, -1, -1, 11, 2]));
  const series = model.system('cpu_cores')!.own.get(0)!;
  assert.equal(
    series.n.reduce((sum, n) => sum + n, 0),
    2
  );
});

test('messages may be cut anywhere', () => {
  const rows = Array.from({ length: 50 }, (_, i) => [i % 3, 1, i, i / 10, i * i]);
  const numbers = rows.flat();
  const whole = new RunModel();
  whole.onTable(table(['loss']));
  whole.onRows(message(0, ...rows));
  for (let seed = 1; seed <= 100; seed++) {
    const random = new Random(seed);
    const model = new RunModel();
    model.onTable(table(['loss']));
    for (let at = 0; at < numbers.length;) {
      const length = 1 + random.below(23);
      model.onRows(message(0, numbers.slice(at, at + length)));
      at += length;
    }
    assert.equal(model.rows, rows.length);
    for (const rank of [0, 1, 2]) {
      assert.deepEqual(losses(model, rank), losses(whole, rank));
    }
  }
});

test('a shared metric is one line, for any rank that reports it first', () => {
  const model = new RunModel();
  model.onTable(table([], ['rate']));
  model.onRows(message(0, [1, 1, 0, 0, 10], [0, 1, 0, 0, 10], [0, 1, 1, 0, 11], [1, 1, 1, 0, 11]));
  model.onRows(message(0, [1, 1, 2, 0, 12], [0, 1, 2, 0, 12]));
  const { shared, own } = model.metrics()[0]!;
  assert.equal(own.size, 0);
  assert.deepEqual([...shared!.mean.subarray(0, 3)], [10, 11, 12]);
  assert.deepEqual([...shared!.n.subarray(0, 3)], [1, 1, 1]);
});

test('a metric may come late, and under another name', () => {
  const model = new RunModel();
  model.onTable(table(['loss']));
  model.onRows(message(0, [0, 1, 0, 0, 1], [0, 1, 1, 0, 1]));
  model.onTable(table(['loss', 'error'], [], [], 1));
  model.onRows(message(1, [0, 1, 2, 0, 4, 7]));
  model.onTable(table(['mistake'], [], [], 2));
  model.onRows(message(2, [0, 1, 3, 0, 8]));
  const metrics = model.metrics();
  assert.deepEqual(
    metrics.map(metric => metric.name),
    ['loss', 'error', 'mistake']
  );
  assert.deepEqual(losses(model, 0), [1, 1, 4]);
  assert.equal(metrics[1]!.own.get(0)!.n[0], 0);
});

test('loss comes first, whenever it came', () => {
  const model = new RunModel();
  model.onTable(table(['accuracy', 'loss']));
  model.onRows(message(0, [0, 1, 0, 0, 0.5, 2]));
  assert.deepEqual(
    model.metrics().map(metric => metric.name),
    ['loss', 'accuracy']
  );
});

test('a metric may be missing on some ranks', () => {
  const model = new RunModel();
  model.onTable(table(['loss']));
  model.onTable(table(['loss', 'extra'], [], [], 1));
  model.onRows(message(0, [0, 1, 0, 0, 1]));
  model.onRows(message(1, [1, 1, 0, 0, 2, 9]));
  const extra = model.metrics()[1]!;
  assert.deepEqual([...extra.own.keys()], [1]);
  assert.ok(Number.isNaN(extra.latest(0)));
  assert.equal(extra.latest(1), 9);
});

test('epochs and reports without a step have an axis of their own', () => {
  const model = new RunModel();
  model.onTable(table(['loss']));
  model.onRows(
    message(0, [0, 1, 100, 1, 5], [0, 1, -1, 1, 4], [0, -1, -1, 2, 3], [0, -1, -1, 3, 2])
  );
  const axes = model.metrics().map(({ grid }) => [grid.axis, grid.first, grid.last]);
  assert.deepEqual(axes, [
    ['step', 100, 100],
    ['epoch', 1, 1],
    ['report', 1, 2]
  ]);
});

test('what is no row of any rank is passed over', () => {
  const model = new RunModel();
  model.onTable(table(['loss']));
  model.onRows(message(7, [0, 1, 1, 0, 1]));
  model.onRows(new Float64Array(0));
  model.onRows(
    message(
      0,
      [NaN, 1, 1, 0, 1],
      [-1, 1, 1, 0, 1],
      [1e9, 1, 1, 0, 1],
      [0.5, 1, 1, 0, 1],
      [0, 1, Infinity, 0, 1]
    )
  );
  assert.equal(model.rows, 0);
  assert.deepEqual(model.metrics(), []);
});

test('what was measured is no metric', () => {
  const model = new RunModel();
  model.onTable(table(['loss'], [], ['step_s']));
  model.onRows(message(0, [0, 1, 1, 0, 0.25, 1]));
  assert.deepEqual(
    model.metrics().map(metric => metric.name),
    ['loss']
  );
  assert.equal(model.measure('step_s')!.latest(0), 0.25);
  assert.equal(model.measure('input_s'), undefined);
});

test('each change is told once, until nobody listens', () => {
  const model = new RunModel();
  let calls = 0;
  const end = model.subscribe(() => calls++);
  model.onTable(table(['loss']));
  model.onRows(message(0, [0, 1, 1, 0, 1], [0, 1, 2, 0, 1]));
  model.onConnection('live');
  model.onCaughtUp();
  assert.equal(calls, 4);
  end();
  model.reset();
  assert.equal(calls, 4);
});

test('after a reset the same rows make the same lines', () => {
  const model = new RunModel();
  for (let time = 0; time < 2; time++) {
    model.reset();
    model.onTable(table(['loss']));
    model.onRows(message(0, [0, 1, 1, 0, 3], [0, 1, 2, 0, 4]));
    assert.deepEqual(losses(model, 0), [3, 4]);
    assert.equal(model.rows, 2);
  }
});

test('bins of all ranks together are bounded', () => {
  const width = PLACE.length + 1;
  const model = new RunModel();
  model.onTable(table(['loss']));
  const rows = new Float64Array(1 + 1000 * width);
  for (let step = 0; step < 1e6; step += 1000) {
    for (let i = 0; i < 1000; i++) {
      rows.set([0, 1, step + i, step + i, i], 1 + i * width);
    }
    model.onRows(rows);
  }
  assert.equal(model.rows, 1e6);
  assert.ok(model.metrics()[0]!.own.get(0)!.n.length <= binsFor(1));
  for (const ranks of [1, 4, 64, 256, 1024]) {
    assert.ok(ranks * binsFor(ranks) <= 2 ** 19, `${ranks} ranks`);
  }
});

/** Steps `first` to `last` of a rank, each a tenth of a second; `lost` seconds came between. */
function steps(rank: number, first: number, last: number, lost = 0): number[][] {
  const length = last - first + 1;
  return Array.from({ length }, (_, i) => [rank, 1, first + i, lost + (first + i) / 10, i]);
}

function counts(model: RunModel, rank: number): number[] {
  const series = model.metrics()[0]!.own.get(rank)!;
  return [...series.n.subarray(0, series.length)];
}

test('of a run that is recovered lost steps go at once, and each step is taken once', () => {
  const model = new RunModel();
  model.onState(runState({}));
  model.onTable(table(['loss'], ['rate']));
  const rated = (rows: number[][]): number[][] => rows.map(row => [...row, row[2]!]);
  model.onRows(message(0, ...rated(steps(0, 1, 7)), ...rated(steps(1, 1, 6))));
  model.onState(runState({ healing: 'rank 2 died' }));
  assert.equal(model.farthest().step, 7);
  model.onState(runState({ heals: [recovery(4, 2)] }));
  assert.equal(model.farthest().step, 4);
  const [loss, rate] = model.metrics();
  const { grid } = loss!;
  assert.deepEqual([grid.first, grid.last, grid.length], [1, 4, 4]);
  assert.deepEqual([loss!.latest(0), rate!.latestOfAll()], [3, 4]);
  model.onRows(message(0, ...rated(steps(0, 5, 9, 1.6)), ...rated(steps(1, 5, 9, 1.6))));
  for (const rank of [0, 1]) {
    assert.deepEqual(counts(model, rank), Array(9).fill(1));
  }
  assert.deepEqual([...rate!.shared!.n.subarray(0, 9)], Array(9).fill(1));
  assert.deepEqual(losses(model, 1), [0, 1, 2, 3, 0, 1, 2, 3, 4]);
  const seconds = [...grid.seconds().subarray(3, 5)].map(time => time.toFixed(1));
  assert.deepEqual(seconds, ['0.4', '2.1']);
});

test('a run that is opened after it was recovered is the same', () => {
  const model = new RunModel();
  model.onState(runState({ heals: [recovery(4, 2), recovery(6, 4)] }));
  model.onTable(table(['loss']));
  const rows = [...steps(0, 1, 7), ...steps(0, 5, 9, 1.6), ...steps(0, 7, 12, 3.4)];
  model.onRows(message(0, ...rows));
  assert.deepEqual(counts(model, 0), Array(12).fill(1));
  assert.equal(model.rows, 12);
  assert.equal(model.farthest().step, 12);
});

test('a run that began again has nothing of before', () => {
  const model = new RunModel();
  model.onState(runState({}));
  model.onTable(table(['loss']));
  model.onRows(message(0, ...steps(0, 3, 7)));
  model.onState(runState({ heals: [recovery(0, 2)] }));
  assert.deepEqual(losses(model, 0), []);
  model.onRows(message(0, ...steps(0, 1, 2, 2)));
  assert.deepEqual(counts(model, 0), [1, 1]);
  assert.equal(model.metrics()[0]!.grid.first, 1);
});
