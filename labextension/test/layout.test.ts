import assert from 'node:assert/strict';
import { test } from 'node:test';

import { Layout } from '../src/run/layout';

/** Storage of a browser; Node has none. */
class Memory {
  constructor(public text: string | null = null) {}
  getItem(): string | null {
    return this.text;
  }
  setItem(_: string, text: string): void {
    this.text = text;
  }
}

test('a layout is that of the view before', () => {
  const storage = new Memory();
  const layout = new Layout(storage);
  layout.toggle('log', 'step loss');
  layout.toggle('wide', 'step loss');
  layout.toggle('wide', 'step loss');
  layout.x = 'time';
  layout.smoothing = 0.9;
  const next = new Layout(storage);
  assert.ok(next.has('log', 'step loss') && !next.has('wide', 'step loss'));
  assert.deepEqual([next.x, next.smoothing], ['time', 0.9]);
});

test('views keep the settings that other views change', () => {
  const storage = new Memory();
  const [one, other] = [new Layout(storage), new Layout(storage)];
  one.x = 'time';
  other.smoothing = 0.5;
  assert.equal(other.x, 'place');
  assert.deepEqual([new Layout(storage).x, new Layout(storage).smoothing], ['time', 0.5]);
});

test('invalid or missing settings are the defaults', () => {
  for (const text of [null, '{', '7', '{"x": 3, "smoothing": 1, "log": {}, "wide": [4]}']) {
    const layout = new Layout(new Memory(text));
    assert.deepEqual([layout.x, layout.smoothing], ['place', 0]);
    assert.ok(!layout.has('log', '4') && !layout.has('wide', '4'));
  }
  const alone = new Layout(null);
  alone.x = 'time';
  assert.equal(alone.x, 'time');
});
