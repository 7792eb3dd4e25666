import type { IRunState } from '../records';
import type { Metric, RunModel } from './model';
import { isOpen } from './status';

/** Number of steps in the mean step time. */
const RECENT_STEPS = 20;
/** Larger differences between the browser's clock and the run are treated as wrong clocks. */
const CLOCKS_DIFFER_S = 3600;

/** Numbers above the charts. NaN if unknown. */
export interface IFigures {
  readonly step: number;
  readonly steps: number;
  readonly epoch: number;
  readonly epochs: number;
  /** Name of the first metric. */
  readonly name: string;
  readonly value: number;
  /** Definition of the value: `last step`, `epoch mean` of a `fit`, `last epoch`, `last report`. */
  readonly definition: string;
  /** Mean time of the last steps, or between the last reports. */
  readonly stepSeconds: number;
  readonly samplesPerSecond: number;
  readonly elapsed: number;
  /** Estimated seconds until the end, from the mean pace so far. */
  readonly left: number;
}

/** Return the current figures of a run. */
export function figures(model: RunModel, now: number): IFigures {
  const { state } = model;
  const far = model.farthest();
  const metric = latestMetric(model);
  const stepSeconds = meanStep(model);
  const elapsed = elapsedOf(state, far.seconds, now);
  const steps = state !== null && state.steps > 0 ? state.steps : NaN;
  const step = far.step >= 0 ? far.step : NaN;
  const batch = state?.batch ?? 0;
  return {
    step,
    steps,
    epoch: far.epoch >= 0 ? far.epoch : NaN,
    epochs: state !== null && state.epochs > 0 ? state.epochs : NaN,
    name: metric?.name ?? '',
    value: metric?.latestOfAll() ?? NaN,
    definition:
      metric === undefined ? '' : state?.kind === 'fit' ? 'epoch mean' : `last ${metric.grid.axis}`,
    stepSeconds,
    samplesPerSecond: batch > 0 ? batch / stepSeconds : NaN,
    elapsed,
    left:
      state !== null && isOpen(state.status)
        ? Math.round(((steps - step) * far.seconds) / step)
        : NaN
  };
}

/**
 * Return the first metric. Of its values by step and by epoch, those by step, in a `fit` the latest.
 */
function latestMetric(model: RunModel): Metric | undefined {
  const all = model.metrics();
  const first = all.filter(metric => metric.name === all[0]?.name);
  const placed = first.filter(metric => metric.grid.axis !== 'report'); // not those of `evaluate`
  const named = placed.length > 0 ? placed : first;
  const bySteps = named.filter(metric => metric.grid.axis === 'step');
  return (bySteps.length > 0 && model.state?.kind !== 'fit' ? bySteps : named).reduce<
    Metric | undefined
  >(
    (last, metric) => (last !== undefined && last.seconds >= metric.seconds ? last : metric),
    undefined
  );
}

/** Return the recent step time, or time between reports, of a rank in seconds. NaN if unknown. */
export function stepSecondsOf(model: RunModel, rank: number): number {
  return model.pace?.own.get(rank)?.recent(RECENT_STEPS) ?? NaN;
}

function meanStep(model: RunModel): number {
  let sum = 0;
  let known = 0;
  for (const series of model.pace?.own.values() ?? []) {
    const seconds = series.recent(RECENT_STEPS);
    if (!Number.isNaN(seconds)) {
      sum += seconds;
      known++;
    }
  }
  return known > 0 ? sum / known : NaN;
}

function elapsedOf(state: IRunState | null, reported: number, now: number): number {
  if (state === null) {
    return reported;
  }
  if (state.ended > 0) {
    return state.ended - state.began;
  }
  const since = now - state.began;
  const isLikely = since >= reported && since < reported + CLOCKS_DIFFER_S;
  return isOpen(state.status) && isLikely ? Math.floor(since) : reported;
}
