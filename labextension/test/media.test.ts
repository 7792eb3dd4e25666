import assert from 'node:assert/strict';
import { test } from 'node:test';
import type { IMediaEntry } from '../src/records';
import { RunModel } from '../src/run/model';

function entry(change: Partial<IMediaEntry>): IMediaEntry {
  return {
    number: 0,
    kind: 'image',
    name: 'x',
    rank: 0,
    epoch: -1,
    step: 1,
    time_s: 0,
    offset: 0,
    size: 1,
    ...change
  };
}

test('media have a series for each name and kind, and entries by rank', () => {
  const model = new RunModel();
  model.onMedia([entry({}), entry({ rank: 3 }), entry({ kind: 'text' }), entry({ step: 2 })]);
  assert.deepEqual(
    model.media.all.map(({ name, kind, ranks }) => [name, kind, ranks]),
    [
      ['x', 'image', [0, 3]],
      ['x', 'text', [0]]
    ]
  );
  assert.deepEqual(
    model.media.all[0]!.of(0).map(({ step }) => step),
    [1, 2]
  );
});

test('a repeated step replaces its content', () => {
  const model = new RunModel();
  const steps = [1, 2, 3, 2, 3, 4];
  model.onMedia(steps.map((step, number) => entry({ step, number })));
  assert.deepEqual(
    model.media.all[0]!.of(0).map(({ step, number }) => [step, number]),
    [
      [1, 0],
      [2, 3],
      [3, 4],
      [4, 5]
    ]
  );
});

test('epochs without steps are entries of their own', () => {
  const model = new RunModel();
  model.onMedia([1, 2].map(epoch => entry({ step: -1, epoch })));
  assert.equal(model.media.all[0]!.of(0).length, 2);
});

test('a new connection starts with an empty index', () => {
  const model = new RunModel();
  model.onMedia([entry({})]);
  model.reset();
  assert.equal(model.media.all.length, 0);
});
