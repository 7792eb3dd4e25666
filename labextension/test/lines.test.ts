import assert from 'node:assert/strict';
import { test } from 'node:test';

import { quantile } from '../src/run/bands';
import { cut, Strip } from '../src/run/decimate';
import { valueOf } from '../src/run/describe';
import { Grid } from '../src/run/grid';
import { Series } from '../src/run/series';
import { smooth } from '../src/run/smooth';
import { padded, panned, zoomed } from '../src/run/span';
import { Random } from './random';

/** A line of these values, a bin each; nan makes a mark, undefined leaves the bin empty. */
function lineOf(values: readonly (number | undefined)[]): Series {
  const grid = new Grid('step', 1 << 16);
  const series = new Series(grid);
  values.forEach((value, place) => {
    const bin = grid.place(place);
    if (value !== undefined) {
      series.add(bin, place, value);
    }
  });
  return series;
}

function noise(random: Random, length: number): (number | undefined)[] {
  return Array.from({ length }, () => {
    const kind = random.next();
    return kind < 0.05 ? undefined : kind < 0.1 ? NaN : random.signed() * 10;
  });
}

function known(values: readonly (number | undefined)[]): number[] {
  return values.filter((value): value is number => value !== undefined && !Number.isNaN(value));
}

test('smoothing of a constant line is that line, from its first value on', () => {
  const line = lineOf(Array.from({ length: 100 }, () => 7));
  const out = new Float32Array(100);
  for (const weight of [0, 0.5, 0.99, 0.999]) {
    smooth(line, weight, out);
    assert.ok(
      out.every(value => Math.abs(value - 7) < 1e-4),
      `weight ${weight}`
    );
  }
});

test('a smoothed line stays between the least and the greatest value, and is nan only where it was', () => {
  for (let seed = 1; seed <= 200; seed++) {
    const random = new Random(seed);
    const values = noise(random, 1 + random.below(400));
    const line = lineOf(values);
    const out = new Float32Array(values.length).fill(NaN);
    smooth(line, random.next(), out);
    const numbers = known(values);
    const [low, high] = [Math.min(...numbers) - 1e-4, Math.max(...numbers) + 1e-4];
    values.forEach((value, i) => {
      const isKnown = value !== undefined && !Number.isNaN(value);
      assert.equal(Number.isNaN(out[i]), !isKnown);
      assert.ok(!isKnown || (out[i]! >= low && out[i]! <= high));
    });
  }
});

test('smoothing is the mean weighted by age, as its definition has it', () => {
  const values = [3, -1, 4, 1, -5, 9];
  const out = new Float32Array(values.length);
  const weight = 0.8;
  smooth(lineOf(values), weight, out);
  values.forEach((_, end) => {
    const weights = values.slice(0, end + 1).map((__, i) => weight ** (end - i));
    const total = weights.reduce((sum, one) => sum + one, 0);
    const mean = weights.reduce((sum, one, i) => sum + one * values[i]!, 0) / total;
    assert.ok(Math.abs(out[end]! - mean) < 1e-5);
  });
});

test('a bin of several values weighs as much as they do', () => {
  const grid = new Grid('step', 8);
  const folded = new Series(grid);
  for (const value of [2, 2, 2, 10]) {
    folded.add(value === 2 ? 0 : 1, 0, value);
  }
  const [out, plain] = [new Float32Array(2), new Float32Array(4)];
  smooth(folded, 0.7, out);
  smooth(lineOf([2, 2, 2, 10]), 0.7, plain);
  assert.ok(Math.abs(out[1]! - plain[3]!) < 1e-5);
});

test('nothing that would be seen of a line is lost when it is cut into columns', () => {
  for (let seed = 1; seed <= 300; seed++) {
    const random = new Random(seed);
    const values = noise(random, 1 + random.below(500));
    const from = random.below(values.length);
    const to = from + 1 + random.below(values.length - from);
    const most = 1 + random.below(100);
    const bins = cut(from, to, most);
    assert.ok(bins.from <= from && bins.columns <= most + 1);
    const strip = new Strip().fill(lineOf(values), bins);
    for (let column = 0; column < bins.columns; column++) {
      const first = bins.from + column * bins.per;
      const part = values.slice(first, Math.min(to, first + bins.per));
      const numbers = known(part);
      assert.equal(
        strip.bad[column] !== 0,
        part.some(value => Number.isNaN(value))
      );
      assert.equal(Number.isNaN(strip.low[column]), numbers.length === 0);
      if (numbers.length > 0) {
        assert.equal(strip.low[column], Math.fround(Math.min(...numbers)));
        assert.equal(strip.high[column], Math.fround(Math.max(...numbers)));
        assert.ok(strip.mean[column]! >= strip.low[column]! - 1e-5);
        assert.ok(strip.mean[column]! <= strip.high[column]! + 1e-5);
      }
    }
  }
});

test('the mean of ranks is of those that said something', () => {
  const bins = cut(0, 3, 10);
  const strips = [lineOf([1, undefined, NaN]), lineOf([3, 5, NaN])].map(line =>
    new Strip().fill(line, bins)
  );
  const mean = new Strip();
  mean.fillMean(strips, bins.columns);
  assert.deepEqual([...mean.mean.subarray(0, 3)], [2, 5, NaN]);
});

test('the latest value is not the mean of its bin', () => {
  const line = { ...lineOf([4, 3]), lastValue: 2.5 };
  const strip = new Strip().fill(line, cut(0, 2, 10));
  assert.equal(valueOf(strip, -1), 2.5);
  assert.equal(valueOf(strip, 1), 3);
  const mean = new Strip();
  mean.fillMean([strip, new Strip().fill({ ...line, lastValue: 0.5 }, cut(0, 2, 10))], 2);
  assert.equal(valueOf(mean, -1), 1.5);
  assert.equal(valueOf(strip.fill(line, cut(0, 1, 10)), -1), 4); // the last bin is not visible
});

test('the envelope of ranks holds each of them', () => {
  const bins = cut(0, 4, 2);
  const values = [
    [1, 9, NaN, undefined],
    [-2, 3, undefined, NaN]
  ];
  const strips = values.map(line => new Strip().fill(lineOf(line), bins));
  const envelope = new Strip();
  envelope.fillEnvelope(strips, bins.columns);
  assert.deepEqual([...envelope.low.subarray(0, 2)], [-2, NaN]);
  assert.deepEqual([...envelope.high.subarray(0, 2)], [9, NaN]);
});

test('columns stay where they are while a line grows', () => {
  for (let length = 100; length < 200; length++) {
    const { from, per } = cut(7, length, 30);
    assert.equal(from % per, 0);
  }
});

test('quantiles lie in order, and the ends are the least and the greatest', () => {
  for (let seed = 1; seed <= 100; seed++) {
    const random = new Random(seed);
    const values = Float64Array.from({ length: 1 + random.below(50) }, () =>
      random.signed()
    ).sort();
    const parts = [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1].map(part => quantile(values, part));
    assert.deepEqual(
      parts,
      [...parts].sort((a, b) => a - b)
    );
    assert.equal(parts[0], values[0]);
    assert.equal(parts[6], values[values.length - 1]);
  }
  assert.ok(Number.isNaN(quantile(new Float64Array(0), 0.5)));
});

test('zoom and pan never leave the whole', () => {
  const whole = { min: 10, max: 110 };
  for (let seed = 1; seed <= 300; seed++) {
    const random = new Random(seed);
    let span = zoomed(whole, whole, 0.5 * random.next(), 10 + 100 * random.next()) ?? whole;
    for (let i = 0; i < 20; i++) {
      const centre = span.min + random.next() * (span.max - span.min);
      span =
        random.next() < 0.5
          ? (zoomed(span, whole, 2 ** (2 * random.signed()), centre) ?? whole)
          : panned(span, whole, random.signed());
      assert.ok(
        span.min >= whole.min - 1e-9 && span.max <= whole.max + 1e-9 && span.min < span.max
      );
    }
  }
});

test('what is under the pointer stays there while zooming', () => {
  const whole = { min: 0, max: 100 };
  const span = zoomed({ min: 20, max: 60 }, whole, 0.5, 30)!;
  assert.deepEqual(span, { min: 25, max: 45 });
  assert.equal(zoomed(span, whole, 100, 30), null);
});

test('a line without a spread has room around it', () => {
  for (const value of [0, 1, -3, 1e-9, 1e12]) {
    const { min, max } = padded(value, value, false);
    assert.ok(min < value && value < max);
  }
  const { min, max } = padded(5, 5, true);
  assert.ok(min > 0 && min < 5 && max > 5);
});
