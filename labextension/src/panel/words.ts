import type { TranslationBundle } from '@jupyterlab/translation';
import type { IClusterState, IDevice, IRunState, IWorkerState } from '../records';
import type { IFigures } from '../run/figures';
import { count, duration, plain } from '../run/words';

const NAMES: Readonly<Record<string, string>> = { tensorflow: 'TensorFlow', jax: 'JAX' };

export function frameworkName(name: string): string {
  return NAMES[name] ?? name;
}

export function clusterTitle(cluster: IClusterState, trans: TranslationBundle): string {
  const workers = cluster.workers.length;
  const count = trans._n('%1 worker', '%1 workers', workers);
  return [count, ...cluster.frameworks.map(frameworkName)].join(' · ');
}

/** Format the devices of a worker, as in `2 × cpu`. A worker may have several kinds. */
export function devicesOf(worker: IWorkerState): string {
  const counts = new Map<string, number>();
  worker.devices.forEach(device =>
    counts.set(nameOf(device), (counts.get(nameOf(device)) ?? 0) + 1)
  );
  return [...counts].map(([name, n]) => (n > 1 ? `${n} × ${name}` : name)).join(', ');
}

/** Return the name of a run. Runs of older versions have none. */
export function runTitle(run: IRunState, trans: TranslationBundle): string {
  return run.name === '' ? trans.__('Cell %1', run.label) : run.name;
}

/** Return the short form of a run's id: its last part. */
export function shortId({ id }: IRunState): string {
  return id.slice(id.lastIndexOf('-') + 1);
}

export function statusName(run: IRunState, trans: TranslationBundle): string {
  const names: Record<IRunState['status'], string> = {
    running: trans.__('running'),
    stopping: trans.__('stopping'),
    finished: trans.__('finished'),
    stopped: trans.__('stopped'),
    failed: trans.__('failed'),
    interrupted: trans.__('interrupted'),
    lost: trans.__('lost')
  };
  return names[run.status];
}

function isToday(then: Date): boolean {
  return then.toDateString() === new Date().toDateString();
}

/** Format a time of day as names of runs do. Includes the date if that is not today. */
export function moment(seconds: number): string {
  const then = new Date(1000 * seconds);
  return isToday(then)
    ? then.toLocaleTimeString(undefined, { timeStyle: 'short', hourCycle: 'h23' })
    : then.toLocaleString(undefined, { dateStyle: 'short', timeStyle: 'short', hourCycle: 'h23' });
}

/**
 * Format start and duration of a run, as in `14:02 · 1 min 20 s`.
 *
 * The default name of a run ends with the time: the start of such a run of today is left out.
 */
export function when(run: IRunState): string {
  const then = new Date(1000 * run.began);
  const clock = [then.getHours(), then.getMinutes()].map(part => String(part).padStart(2, '0'));
  const start = isToday(then) && run.name.endsWith(clock.join(':')) ? '' : moment(run.began);
  const took = run.ended > 0 ? duration(run.ended - run.began) : '';
  return [start, took].filter(part => part !== '').join(' · ');
}

/** Format the progress of a run, as in `step 120 of 400 · loss 0.21 · 1,204 samples/s`. */
export function progress(figures: IFigures, trans: TranslationBundle): string {
  const parts = [
    Number.isNaN(figures.step) ? '' : stepText(figures, trans),
    figures.name === '' ? '' : `${figures.name} ${plain(figures.value)} (${figures.definition})`,
    rate(figures, trans)
  ];
  return parts.filter(part => part !== '').join(' · ');
}

/** Format samples per second. Empty if unknown. */
export function rate(figures: IFigures, trans: TranslationBundle): string {
  const known = Number.isFinite(figures.samplesPerSecond);
  return known ? trans.__('%1 samples/s', plain(figures.samplesPerSecond)) : '';
}

function stepText({ step, steps }: IFigures, trans: TranslationBundle): string {
  return Number.isNaN(steps)
    ? trans.__('step %1', count(step))
    : trans.__('step %1 of %2', count(step), count(steps));
}

function nameOf(device: IDevice): string {
  return device.kind === '' ? device.platform : device.kind;
}
