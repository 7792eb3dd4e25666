/** How many frames a second the run view draws while rows come in; for `benchmarks/chart`. */

import type { IRunState } from '../src/records';
import { RunModel } from '../src/run/model';
import { RunView } from '../src/run/view';
import { runState } from '../test/states';

const MEASURES = ['step_s', 'input_s', 'collective_s', 'process_bytes', 'device_bytes'];
const TABLE = {
  number: 0,
  columns: { measures: MEASURES, own: ['loss'], shared: ['rate'], system: [] }
};
/** Frames before the first that counts: code is compiled, tables get their layout. */
const WARM_UP_FRAMES = 20;
/** Numbers in a message, as the server sends them: 1 MiB. */
const MESSAGE_LENGTH = 2 ** 17;

export interface IChartLoad {
  readonly ranks: number;
  /** Of each rank, before the clock starts. */
  readonly points: number;
  /** How long frames are counted. */
  readonly seconds: number;
}

export interface IChartSpeed {
  readonly framesPerSecond: number;
  /** The longest time between two frames. */
  readonly longestMs: number;
  /** Time to add the points before the measurement. */
  readonly fillMs: number;
  /** Script of ours in a frame: rows taken in and everything drawn, the median. */
  readonly scriptMs: number;
}

/** Show a run of `load.ranks` in `host`; in each frame every rank makes a step. */
export async function measure(host: HTMLElement, load: IChartLoad): Promise<IChartSpeed> {
  const model = new RunModel();
  const view = new RunView(host, model, { stop: () => Promise.resolve(true) });
  const run = new SyntheticRun(model, load.ranks);
  const began = performance.now();
  run.addSteps(load.points);
  model.onCaughtUp();
  const fillMs = performance.now() - began;
  for (let frame = 0; frame < WARM_UP_FRAMES; frame++) {
    run.addSteps(1);
    await nextFrame();
  }
  const { times, scripts } = await count(run, load.seconds);
  view.dispose();
  const between = times.slice(1).map((time, i) => time - times[i]!);
  const total = times[times.length - 1]! - times[0]!;
  return {
    framesPerSecond: (1000 * between.length) / total,
    longestMs: Math.max(...between),
    fillMs,
    scriptMs: scripts.sort((a, b) => a - b)[scripts.length >> 1] ?? 0
  };
}

/** When each frame began, and how long the callbacks of all frames took. */
async function count(
  run: SyntheticRun,
  seconds: number
): Promise<{ times: number[]; scripts: number[] }> {
  const times: number[] = [await nextFrame()];
  const scripts: number[] = [];
  while (times[times.length - 1]! - times[0]! < 1000 * seconds) {
    const began = performance.now();
    run.addSteps(1);
    times.push(await nextFrame());
    scripts.push(performance.now() - Math.max(began, times[times.length - 1]!));
  }
  return { times, scripts };
}

/** Return the time of the next frame, in which all earlier changes are drawn. */
function nextFrame(): Promise<number> {
  return new Promise(resolve => requestAnimationFrame(resolve));
}

/** A run whose ranks make steps one after the other: a falling loss with noise, a slow rank. */
class SyntheticRun {
  private step = 0;
  private seed = 1;

  constructor(
    private readonly model: RunModel,
    private readonly ranks: number
  ) {
    model.onState(stateOf(ranks));
    model.onConnection('live');
    model.onTable(TABLE);
  }

  /** In messages as the server makes them. */
  addSteps(steps: number): void {
    const width = 4 + MEASURES.length + 2;
    const most = Math.max(1, Math.floor(MESSAGE_LENGTH / (width * this.ranks)));
    for (let left = steps; left > 0; left -= most) {
      this.model.onRows(this.message(Math.min(left, most), width));
    }
  }

  private message(steps: number, width: number): Float64Array {
    const values = new Float64Array(1 + steps * this.ranks * width);
    let at = 1;
    for (let i = 0; i < steps; i++) {
      this.step++;
      for (let rank = 0; rank < this.ranks; rank++) {
        values.set(this.row(rank), at);
        at += width;
      }
    }
    return values;
  }

  private row(rank: number): number[] {
    const { step } = this;
    const loss = 2.3 * Math.exp(-step / 3000) * (1 + 0.1 * this.noise()) + 0.2;
    const seconds = 0.012 * (1 + 0.05 * this.noise());
    const waits = rank === 1 ? 0.001 : 0.003 + 0.0005 * this.noise();
    return [rank, 1, step, step * 0.012, seconds, 0.0005, waits, 8e8 + 1e4 * step, 0, loss, 1e-3];
  }

  /** In -1..1, the same in each run. */
  private noise(): number {
    this.seed = (Math.imul(this.seed, 1664525) + 1013904223) >>> 0;
    return this.seed / 2 ** 31 - 1;
  }
}

function stateOf(ranks: number): IRunState {
  const workers = Array.from({ length: ranks }, (_, rank) => ({
    rank,
    host: `host-${rank >> 3}`,
    pid: rank,
    devices: '1 x cpu',
    status: 'running' as const,
    said: ''
  }));
  return runState({ began: Date.now() / 1000, workers, replicas: ranks, batch: 256, epochs: 1 });
}
