import assert from 'node:assert/strict';
import { test } from 'node:test';

import type { ITimeline } from '../src/records';
import { endOf, firstAfter, lanesOf, spanAt } from '../src/timeline/lanes';

const TIMELINE: ITimeline = {
  began_s: 5,
  names: ['dot', 'tanh'],
  lanes: [
    {
      rank: 1,
      device: 0,
      kind: 'compute',
      gaps_us: [10, 5, 100],
      lengths_us: [20, 1, 2],
      names: [0, 1, 0]
    },
    { rank: 1, device: -1, kind: 'input', gaps_us: [0], lengths_us: [7], names: [1] }
  ]
};

test('lanes have absolute times and the names of their devices', () => {
  const [compute, input] = lanesOf(TIMELINE);
  assert.deepEqual([...compute!.begins], [10, 35, 136]);
  assert.deepEqual([...compute!.ends], [30, 36, 138]);
  assert.equal(compute!.name, 'rank 1 · device 0 · compute');
  assert.equal(input!.name, 'rank 1 · host · input');
  assert.equal(endOf(lanesOf(TIMELINE)), 138);
});

test('a span is found at a time, or near it', () => {
  const [lane] = lanesOf(TIMELINE);
  assert.equal(firstAfter(lane!, 30), 1);
  assert.equal(firstAfter(lane!, 200), 3);
  assert.equal(spanAt(lane!, 20, 0), 0);
  assert.equal(spanAt(lane!, 33, 0), -1);
  assert.equal(spanAt(lane!, 33, 3), 1);
  assert.equal(spanAt(lane!, 150, 1), -1);
});
