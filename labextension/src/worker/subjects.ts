import type { IDisposable } from '@lumino/disposable';
import type { IWatch, LiveRuns } from '../live';
import type { ServerModel } from '../panel/model';
import { devicesOf } from '../panel/words';
import type { IRunState, IWorkerState } from '../records';
import type { ILook } from '../run/status';
import { RANK_LOOKS } from '../run/status';
import { ofRun, ofWorker } from '../socket';
import { WorkerFeed } from './feed';
import type { IHead, IShownRun, WorkerPage } from './page';
import { headOf } from './page';

const IDLE: ILook = { sign: '○', word: 'idle', tone: 'calm' };
const ENDED: ILook = { sign: '◼', word: 'ended', tone: 'calm' };

/** Looks by the state of a worker of a cluster. */
const LOOKS: Readonly<Record<string, ILook>> = {
  idle: IDLE,
  busy: RANK_LOOKS.running,
  dead: RANK_LOOKS.dead
};

/** Worker that a page shows. */
export interface ISubject extends IDisposable {
  readonly log: WorkerFeed;
  /** Id of the run on the page. Empty without a run. */
  readonly run: string;
  head(): IHead | null;
  /** Show the runs of the worker on the page. `onRun` gets the state of the run of its tab. */
  start(page: WorkerPage, onRun: (run: IRunState) => void): void;
}

/** Worker of one run. */
export class RunSubject implements ISubject {
  constructor(
    readonly run: string,
    private readonly rank: number,
    runs: LiveRuns
  ) {
    this.watch = runs.watch(run);
    this.log = new WorkerFeed(ofRun(run, rank), rank, runs.settings);
  }

  readonly log: WorkerFeed;
  isDisposed = false;

  head(): IHead | null {
    return headOf(this.watch.model, this.rank);
  }

  start(page: WorkerPage, onRun: (run: IRunState) => void): void {
    const { model } = this.watch;
    page.show({ model, feed: this.log });
    const update = (): void => {
      if (model.state !== null) {
        onRun(model.state);
      }
    };
    this.stopListening = model.subscribe(update);
    update();
  }

  dispose(): void {
    this.isDisposed = true;
    this.stopListening();
    this.log.dispose();
    this.watch.dispose();
  }

  private readonly watch: IWatch;
  private stopListening = (): void => {};
}

/**
 * Worker of a cluster: the text of all its cells. Its stack, times and use of the host are those of
 * the active run, else of the newest one.
 */
export class ClusterSubject implements ISubject {
  constructor(
    private readonly cluster: string,
    private readonly rank: number,
    private readonly runs: LiveRuns,
    private readonly server: ServerModel
  ) {
    this.log = new WorkerFeed(ofWorker(cluster, rank), rank, runs.settings);
  }

  readonly log: WorkerFeed;
  run = '';
  isDisposed = false;

  head(): IHead | null {
    if (this.worker === null) {
      return null;
    }
    const { host, pid, state } = this.worker;
    const look = this.hasEnded ? ENDED : (LOOKS[state] ?? IDLE);
    const devices = devicesOf(this.worker);
    const place = [host, `pid ${pid}`, devices].filter(part => part !== '').join(' · ');
    return { look, place, error: '' };
  }

  start(page: WorkerPage): void {
    this.page = page;
    this.server.changed.connect(this.update, this);
    this.update();
  }

  dispose(): void {
    this.isDisposed = true;
    this.server.changed.disconnect(this.update, this);
    this.leave();
    this.log.dispose();
  }

  private update(): void {
    if (this.server.trouble !== 'none') {
      return;
    }
    const cluster = this.server.clusters.find(({ id }) => id === this.cluster);
    const worker = cluster?.workers.find(({ rank }) => rank === this.rank);
    this.hasEnded = worker === undefined;
    this.worker = worker ?? this.worker;
    const run = runOf(this.worker, cluster?.run ?? '', this.server.runs);
    if (run !== this.run) {
      this.leave();
      this.run = run;
      this.page?.show(run === '' ? null : this.watched(run));
    }
    this.page?.later();
  }

  private watched(run: string): IShownRun {
    this.watch = this.runs.watch(run);
    this.feed = new WorkerFeed(ofRun(run, this.rank), this.rank, this.runs.settings);
    return { model: this.watch.model, feed: this.feed };
  }

  private leave(): void {
    this.watch?.dispose();
    this.feed?.dispose();
  }

  /** Latest state of the worker. Null before the first answer of the server. */
  private worker: IWorkerState | null = null;
  private hasEnded = false;
  private page: WorkerPage | null = null;
  private watch: IWatch | null = null;
  private feed: WorkerFeed | null = null;
}

/**
 * Return the id of the run for the page of a worker: that of the cell that it runs, else that of the
 * newest run of its process. Empty without a run.
 *
 * @param active id of the active run of the cluster.
 */
export function runOf(
  worker: IWorkerState | null,
  active: string,
  runs: readonly IRunState[]
): string {
  if (worker?.state === 'busy' && active !== '') {
    return active;
  }
  const isOf = ({ workers }: IRunState): boolean =>
    workers.some(
      one => one.rank === worker?.rank && one.host === worker.host && one.pid === worker.pid
    );
  return runs.find(isOf)?.id ?? '';
}
