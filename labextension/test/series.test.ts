import assert from 'node:assert/strict';
import { test } from 'node:test';

import { Grid } from '../src/run/grid';
import { NOT_A_NUMBER, Series, TOO_HIGH, TOO_LOW } from '../src/run/series';
import { Random } from './random';

const CAPACITY = 64;

function filled(places: readonly number[], valueOf: (place: number) => number): [Grid, Series] {
  const grid = new Grid('step', CAPACITY);
  const series = new Series(grid);
  for (const place of places) {
    series.add(grid.place(place), place, valueOf(place));
  }
  return [grid, series];
}

function range(from: number, to: number): number[] {
  return Array.from({ length: to - from }, (_, i) => from + i);
}

test('a line of a million points keeps few bins, its extremes and its mean', () => {
  const random = new Random(1);
  const values = Float32Array.from({ length: 1e6 }, () => random.signed());
  values[123_456] = 50;
  values[654_321] = -50;
  const [grid, series] = filled(range(0, 1e6), place => values[place]!);
  assert.ok(grid.length <= CAPACITY && series.n.length <= CAPACITY);
  assert.equal(series.max[grid.binOf(123_456)], 50);
  assert.equal(series.min[grid.binOf(654_321)], -50);
  let [sum, count] = [0, 0];
  for (let bin = 0; bin < series.length; bin++) {
    sum += series.mean[bin]! * series.n[bin]!;
    count += series.n[bin]!;
  }
  assert.equal(count, 1e6);
  const mean = values.reduce((total, value) => total + value, 0) / 1e6;
  assert.ok(Math.abs(sum / count - mean) < 1e-5);
});

test('each bin holds the least, greatest and mean of its places, in whatever order they come', () => {
  for (let seed = 1; seed <= 200; seed++) {
    const random = new Random(seed);
    const first = random.below(5000);
    const places = random.shuffle(range(first, first + 1 + random.below(600)));
    const valueOf = (place: number): number => Math.fround(Math.sin(place * seed));
    const [grid, series] = filled(places, valueOf);
    assert.ok(grid.length <= CAPACITY, `${grid.length} bins`);
    for (const bin of new Set(places.map(place => grid.binOf(place)))) {
      const values = places.filter(place => grid.binOf(place) === bin).map(valueOf);
      assert.equal(series.n[bin], values.length);
      assert.equal(series.min[bin], Math.min(...values));
      assert.equal(series.max[bin], Math.max(...values));
      const mean = values.reduce((total, value) => total + value, 0) / values.length;
      assert.ok(Math.abs(series.mean[bin]! - mean) < 1e-5);
    }
  }
});

test('a run that goes on from step 1,000,000 is not squeezed into one bin', () => {
  const [grid, series] = filled(range(1e6, 1e6 + CAPACITY), place => place);
  assert.equal(grid.stride, 1);
  assert.equal(series.mean[grid.binOf(1e6 + 5)], 1e6 + 5);
});

test('steps far apart need no more bins', () => {
  const [grid, series] = filled([1, 2 ** 50], place => Math.sign(place));
  assert.ok(grid.length <= CAPACITY);
  assert.equal(series.n[grid.binOf(1)], 1);
  assert.equal(series.n[grid.binOf(2 ** 50)], 1);
});

test('values that are no numbers are marked and leave the others as they are', () => {
  const given = [1, NaN, Infinity, -Infinity, 1e300, 3];
  const [, series] = filled(range(0, given.length), place => given[place]!);
  assert.deepEqual(
    [...series.bad.subarray(0, 6)],
    [0, NOT_A_NUMBER, TOO_HIGH, TOO_LOW, TOO_HIGH, 0]
  );
  assert.deepEqual([...series.n.subarray(0, 6)], [1, 0, 0, 0, 0, 1]);
  assert.equal(series.recent(2), 2);
});

test('marks of values that are none outlive the folding of bins', () => {
  const [grid, series] = filled(range(0, 1000), place => (place === 500 ? NaN : 1));
  assert.equal(series.bad[grid.binOf(500)], NOT_A_NUMBER);
  assert.equal(
    series.bad.reduce((total, bits) => total + bits, 0),
    NOT_A_NUMBER
  );
});

test('a series that begins late has empty bins before', () => {
  const grid = new Grid('step', CAPACITY);
  const [early, late] = [new Series(grid), new Series(grid)];
  for (const place of range(0, 40)) {
    const bin = grid.place(place);
    early.add(bin, place, 1);
    if (place >= 30) {
      late.add(bin, place, 2);
    }
  }
  assert.equal(
    late.n.subarray(0, 30).reduce((total, n) => total + n, 0),
    0
  );
  assert.equal(late.length, early.length);
});

test('bins go on in time when a clock is set back, and forth', () => {
  const grid = new Grid('step', CAPACITY);
  const clock = [0, 1, 2, -3600, -3599, -3598, 7200, 7201];
  clock.forEach((time, place) => grid.clock(grid.place(place), time));
  const seconds = [...grid.seconds().subarray(0, grid.length)];
  assert.ok(
    seconds.every((time, i) => i === 0 || time >= seconds[i - 1]!),
    String(seconds)
  );
  assert.equal(seconds[5]! - seconds[3]!, 2);
});

test('a time that is no number is passed over', () => {
  const grid = new Grid('step', CAPACITY);
  [0, NaN, Infinity, 3].forEach((time, place) => grid.clock(grid.place(place), time));
  assert.deepEqual([...grid.seconds().subarray(0, 4)], [0, 0, 0, 3]);
});

test('a mark goes down to the first bin that changed', () => {
  const grid = new Grid('step', CAPACITY);
  range(0, 10).forEach(place => grid.place(place));
  const mark = grid.mark();
  mark.from = 10;
  grid.touch(7);
  grid.touch(9);
  assert.equal(mark.from, 7);
  grid.unmark(mark);
  grid.touch(2);
  assert.equal(mark.from, 7);
});
