import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import type { IFinding, IRunState } from '../src/records';
import { Bands } from '../src/run/bands';
import { entries } from '../src/run/describe';
import { figures } from '../src/run/figures';
import { RunModel } from '../src/run/model';
import { Picture } from '../src/run/picture';
import { explanation } from '../src/run/planned';
import type { ISource } from '../src/run/sources';
import {
  memorySources,
  metricSources,
  shareSources,
  stepTimeSources,
  throughputSources
} from '../src/run/sources';
import { rankLook } from '../src/run/status';
import { LINE_COLOURS } from '../src/run/theme';
import { amount, duration, recovered, plain, ranks, ticks } from '../src/run/words';
import { stragglersOf } from '../src/run/workers';
import { recovery, runState } from './states';

const MEASURES = ['step_s', 'input_s', 'collective_s', 'process_bytes', 'device_bytes'];
const NOW = 1_000_000;

function state(change: Partial<IRunState>): IRunState {
  return runState({ began: NOW - 60, ...change });
}

/** Two steps of each rank; of rank r step, input and collective take what `times` says. */
function measured(times: readonly (readonly [number, number, number])[], batch = 0): RunModel {
  const model = new RunModel();
  model.onState(state({ batch, steps: 8, epochs: 2 }));
  model.onTable({
    number: 0,
    columns: { measures: MEASURES, own: ['loss'], shared: [], system: [] }
  });
  for (const step of [1, 2]) {
    times.forEach((time, rank) => {
      model.onRows(Float64Array.from([0, rank, 1, step, step * 10, ...time, 5e8, 0, rank]));
    });
  }
  return model;
}

function means(source: ISource): number[] {
  return source.lines().map(({ trace }) => Number(trace.mean[0]!.toFixed(5)));
}

test('throughput is the batch over the time of a step, or steps a second', () => {
  const times = [[0.5, 0, 0]] as const;
  const [samples] = throughputSources(measured(times, 64));
  assert.deepEqual([samples!.title, ...means(samples!)], ['samples/s', 128]);
  const [steps] = throughputSources(measured(times));
  assert.deepEqual([steps!.title, ...means(steps!)], ['steps/s', 2]);
});

test('a loop that calls report has the times between its reports', () => {
  const model = new RunModel();
  model.onState(state({}));
  model.onTable({ number: 0, columns: { measures: [], own: ['loss'], shared: [], system: [] } });
  const columns = { measures: ['report_s'], own: [], shared: [], system: [] };
  model.onTable({ number: 1, columns });
  model.onRows(Float64Array.from([0, ...[0, -1, 1, 1, 5], ...[0, -1, 2, 1.5, 4]]));
  model.onRows(Float64Array.from([1, ...[0, -1, 2, 1.5, 0.5]]));
  const [time] = stepTimeSources(model);
  const [rate] = throughputSources(model);
  const last = (source: ISource): unknown => {
    const { mean, length } = source.lines()[0]!.trace;
    return [source.title, mean[length - 1]];
  };
  assert.deepEqual(
    [last(time!), last(rate!)],
    [
      ['between reports', 0.5],
      ['reports/s', 2]
    ]
  );
  assert.equal(figures(model, NOW).stepSeconds, 0.5);
  assert.deepEqual(shareSources(model), []);

  model.onTable({ number: 2, columns: { ...columns, measures: ['step_s'] } });
  model.onRows(Float64Array.from([2, ...[0, -1, 1, 1, 0.25]]));
  assert.deepEqual(
    [...stepTimeSources(model), ...throughputSources(model)].map(source => source.title),
    ['step time', 'steps/s']
  );
});

test('the network has the least of the collectives, ranks wait for the rest', () => {
  const [network, input] = shareSources(
    measured([
      [1, 0.1, 0.3],
      [1, 0.2, 0.05],
      [1, 0, 0.2]
    ])
  );
  assert.deepEqual(means(network!), [0.25, 0, 0.15]);
  assert.equal(Number(network!.whole()!.mean[0]!.toFixed(5)), 0.05);
  assert.deepEqual(means(input!), [0.1, 0.2, 0]);
});

test('a step without time has no share', () => {
  const [network] = shareSources(measured([[0, 0, 0]]));
  assert.equal(network!.lines()[0]!.trace.n[0], 0);
});

test('memory is shown of devices only where they have some', () => {
  const model = measured([[1, 0, 0]]);
  assert.deepEqual(
    memorySources(model).map(source => source.title),
    ['process memory']
  );
});

test('a metric that comes by step and by epoch has two charts', () => {
  const model = measured([[1, 0, 0]]);
  model.onTable({ number: 1, columns: { measures: [], own: ['loss'], shared: [], system: [] } });
  model.onRows(Float64Array.from([1, 0, 1, -1, 30, 0.5]));
  assert.deepEqual(
    metricSources(model).map(source => source.title),
    ['loss (by step)', 'loss (by epoch)']
  );
  model.onState(state({ kind: 'fit' }));
  assert.deepEqual(
    metricSources(model).map(source => source.title),
    ['loss (by step, as Keras logs it)', 'loss (by epoch)']
  );
  assert.deepEqual(
    stepTimeSources(model).map(source => source.title),
    ['step time']
  );
});

test('charts of signals show the interval of their steps', () => {
  const model = new RunModel();
  const shared = ['loss', 'grad_norm', 'learning_rate of head'];
  model.onTable({ number: 0, columns: { measures: [], own: [], shared, system: [] } });
  model.onRows(Float64Array.from([0, 0, 1, 1, 0.5, 4, 3, 2]));
  const titles = (change: Partial<IRunState>): string[] => {
    model.onState(state(change));
    return metricSources(model).map(source => source.title);
  };
  assert.deepEqual(titles({ kind: 'fit', signal_steps: 20 }), [
    'loss (by step, as Keras logs it)',
    'grad_norm (every 20 steps)',
    'learning_rate of head (every 20 steps)'
  ]);
  assert.deepEqual(titles({}), shared); // metrics that the user reports
});

test('a chart of values every few steps shows the last one before the pointer', () => {
  const model = new RunModel();
  model.onState(state({}));
  model.onTable({ number: 0, columns: { measures: [], own: [], shared: ['loss'], system: [] } });
  const shared = ['loss', 'grad_norm'];
  model.onTable({ number: 1, columns: { measures: [], own: [], shared, system: [] } });
  for (let step = 1; step <= 40; step++) {
    const values = step % 20 === 0 ? [step, 10 * step] : [step];
    model.onRows(Float64Array.from([Number(values.length > 1), 0, 1, step, step, ...values]));
  }
  const [loss, norm] = metricSources(model).map(source => new Picture(source, new Set()));
  const at = (picture: Picture, x: number): unknown => {
    picture.update({ x: 'place', smoothing: 0 }, false, null, 400);
    const column = picture.filled(picture.columnAt(x));
    return [picture.x[column], entries(picture, column, text => text)[0]!.value];
  };
  assert.deepEqual(at(loss!, 33), [33, '33']);
  assert.deepEqual(at(norm!, 33), [20, '200']);
  assert.deepEqual(at(norm!, 7), [7, '–']);
});

/** Of two colours, as WCAG 2.2 defines it. */
function contrast(a: string, b: string): number {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high! + 0.05) / (low! + 0.05);
}

function luminance(colour: string): number {
  const [red, green, blue] = [1, 3, 5].map(at => {
    const part = parseInt(colour.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red! + 0.7152 * green! + 0.0722 * blue!;
}

test('a run that has said nothing has nothing to draw', () => {
  const model = new RunModel();
  const makers = [metricSources, stepTimeSources, throughputSources, memorySources, shareSources];
  assert.deepEqual(
    makers.flatMap(make => make(model)),
    []
  );
});

test('figures are of the farthest rank and of all ranks', () => {
  const known = figures(
    measured(
      [
        [0.2, 0, 0],
        [0.3, 0, 0]
      ],
      10
    ),
    NOW
  );
  assert.deepEqual([known.step, known.steps, known.epoch, known.epochs], [2, 8, 1, 2]);
  assert.deepEqual([known.name, known.value, known.definition], ['loss', 0.5, 'last step']);
  assert.equal(Number(known.stepSeconds.toFixed(5)), 0.25);
  assert.equal(Number(known.samplesPerSecond.toFixed(3)), 40);
  assert.deepEqual([known.elapsed, known.left], [60, 60]);
});

test('the loss of a fit is that of its latest report, and a mean of its epoch', () => {
  const model = new RunModel();
  model.onState(state({ kind: 'fit' }));
  model.onTable({
    number: 0,
    columns: { measures: ['step_s'], own: [], shared: ['loss'], system: [] }
  });
  model.onTable({ number: 1, columns: { measures: [], own: [], shared: ['loss'], system: [] } });
  model.onRows(Float64Array.from([0, ...[0, 1, 1, 1, 0.5, 9], ...[0, 1, 2, 2, 0.5, 8]]));
  model.onRows(Float64Array.from([1, ...[0, 1, -1, 2.1, 7]]));
  const shown = (): unknown[] => [figures(model, NOW).value, figures(model, NOW).definition];
  assert.deepEqual(shown(), [7, 'epoch mean']);
  model.onRows(Float64Array.from([0, ...[0, 2, 3, 3, 0.5, 6]]));
  assert.deepEqual(shown(), [6, 'epoch mean']);
  model.onRows(Float64Array.from([1, ...[0, -1, -1, 4, 5]])); // `evaluate` after the fit
  assert.deepEqual(shown(), [6, 'epoch mean']);
  model.onRows(Float64Array.from([1, ...[0, 2, -1, 3.1, 5]]));
  model.onState(state({ kind: 'step' }));
  assert.deepEqual(shown(), [6, 'last step']);
});

test('the clock of the browser is not trusted when it cannot be right', () => {
  const model = measured([[0.2, 0, 0]]);
  assert.equal(figures(model, NOW - 1e6).elapsed, 20);
  assert.equal(figures(model, NOW + 1e6).elapsed, 20);
  model.onState(state({ status: 'finished', ended: NOW - 20 }));
  assert.equal(figures(model, NOW + 1e6).elapsed, 40);
  assert.ok(Number.isNaN(figures(model, NOW).left));
});

test('of many ranks those far from the others are named, the farthest first', () => {
  const times = Array.from({ length: 100 }, (_, rank) => [1 + rank / 1e4, 0, 0] as const);
  const [near, far] = [[1.5, 0, 0] as const, [3, 0, 0] as const];
  const model = measured([...times, near, far]);
  const [source] = stepTimeSources(model);
  const bands = new Bands(source!.grid);
  bands.update(source!.lines());
  assert.deepEqual(bands.outliers(source!.lines()), [101, 100]);
  bands.dispose();
});

test('ranks of a stopped run are stopped, not interrupted', () => {
  assert.equal(rankLook('interrupted', 'stopped').word, 'stopped');
  assert.equal(rankLook('interrupted', 'interrupted').word, 'interrupted');
  assert.equal(rankLook('running', 'lost').word, 'unknown');
});

test('stragglers are those of the findings', () => {
  const finding = (topic: IFinding['topic'], ...found: number[]): IFinding => ({
    topic,
    text: '',
    ranks: found,
    value: 0,
    warning: true
  });
  const found = stragglersOf(state({ findings: [finding('straggler', 3, 5), finding('nan', 1)] }));
  assert.deepEqual([...found], [3, 5]);
  assert.equal(stragglersOf(null).size, 0);
});

test('colours of lines are seen on white and on black', () => {
  for (const colour of LINE_COLOURS) {
    assert.ok(contrast(colour, '#ffffff') >= 3, colour);
    assert.ok(contrast(colour, '#111111') >= 3, colour);
  }
});

test('amounts are written in the unit that fits them', () => {
  assert.deepEqual(
    [
      amount(0.0123, 'seconds'),
      amount(12e-6, 'seconds'),
      amount(2.5, 'seconds'),
      amount(0, 'seconds')
    ],
    ['12.3 ms', '12 µs', '2.5 s', '0 s']
  );
  assert.deepEqual(
    [amount(1.5 * 1024 ** 3, 'bytes'), amount(1.5e6, 'bytes/s'), amount(0.231, 'share')],
    ['1.50 GiB', '1.50 MB/s', '23.1 %']
  );
  assert.deepEqual(
    [plain(NaN), plain(-Infinity), plain(0.41271), plain(3), plain(1e-9)],
    ['nan', '−∞', '0.4127', '3', '1.00e-9']
  );
});

test('marks of an axis are told apart', () => {
  assert.deepEqual(ticks([0, 0.25, 0.5], 'number', 0.25), ['0', '0.25', '0.50']);
  assert.deepEqual(ticks([0, 500, 1000], 'number', 500), ['0', '500', '1,000']);
  assert.deepEqual(ticks([10000, 12500], 'number', 2500), ['10.0k', '12.5k']);
  assert.deepEqual(ticks([0.005, 0.01], 'seconds', 0.005), ['5 ms', '10 ms']);
});

test('durations have one format, that of Python', () => {
  const cases = JSON.parse(readFileSync('../tests/views/durations.json', 'utf8')) as [
    number,
    string
  ][];
  assert.deepEqual(
    cases.map(([seconds]) => duration(seconds)),
    cases.map(([, text]) => text)
  );
});

test('ranks are ranges', () => {
  assert.equal(ranks([4, 0, 2, 3]), '0, 2–4');
});

test('a recovery in words, in those of the reader', () => {
  const translate = (text: string): string => text;
  assert.equal(
    recovered(recovery(1050, 9), translate),
    'recovered: rank 2 died after step 7, resumed after step 1,050, 1.4 s lost'
  );
  assert.equal(
    recovered(recovery(0, 9, 65), translate),
    'recovered: rank 2 died after step 7, restarted, 1 min 05 s lost'
  );
  assert.equal(
    recovered({ ...recovery(1050, 9), workers: 2 }, translate),
    'recovered: rank 2 died after step 7, resumed after step 1,050 with 2 workers, 1.4 s lost'
  );
  assert.equal(recovered(recovery(0, 9), text => text.toUpperCase()).slice(0, 10), 'RECOVERED:');
});

test('a mark is where its recovery is in what is seen', () => {
  const model = new RunModel();
  model.onState(state({ heals: [recovery(3, 40)] }));
  model.onTable({ number: 0, columns: { measures: [], own: ['loss'], shared: [], system: [] } });
  model.onTable({ number: 1, columns: { measures: [], own: ['val'], shared: [], system: [] } });
  for (const step of [1, 2, 3, 4, 5]) {
    const time = step * 10 + (step > 3 ? 10 : 0);
    model.onRows(Float64Array.from([0, 0, 1, step, time, 1]));
  }
  model.onRows(Float64Array.from([1, 0, 1, -1, 30, 1, 0, 2, -1, 50, 1, 0, 3, -1, 60, 1]));
  const [loss, val] = metricSources(model).map(source => new Picture(source, new Set()));
  const part = (picture: Picture, x: 'place' | 'time', step: number): number => {
    const settings = { x, smoothing: 0 };
    picture.update(settings, false, null, 100);
    return picture.partOf(recovery(step, 40), settings);
  };
  assert.equal(part(loss!, 'place', 3), 0.5);
  assert.equal(part(loss!, 'place', 0), 0);
  assert.equal(part(loss!, 'time', 3), 0.6);
  assert.equal(part(val!, 'place', 3), 0.5, 'the first epoch that ended after it');
});

test('a measurement far from the plan is explained', () => {
  const planned = { step_s: 0.01, collectives: 0.1, arguments: 10, memory: 100 };
  const near = { ...planned, step_s: 0.015, collectives: null };
  const same = (text: string): string => text;
  assert.equal(explanation({ planned, measured: near }, same), '');
  const slow = explanation({ planned, measured: { ...near, step_s: 0.9665 } }, same);
  assert.match(slow, /^Measured step time \/ plan = 97: .*--bench/);
  const small = explanation({ planned, measured: { ...near, memory: 25 } }, same);
  assert.match(small, /^Measured memory \/ plan = 0\.25/);
});
