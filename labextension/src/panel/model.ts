import { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { Poll } from '@lumino/polling';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import type { IClusterState, IRunList, IRunState } from '../records';
import { isOpen } from '../run/status';
import { request } from '../server';

const LONGEST_WAIT_MS = 60_000;

/** Cause of missing data: nbdist is not installed on the server, or the server does not respond. */
export type Trouble = 'none' | 'unserved' | 'unreachable';

/** Reasons for runs that the server cannot read, by id, newest first. */
export type Refused = Readonly<Record<string, string>>;

/** Clusters and runs of the server, polled at an interval. */
export class ServerModel implements IDisposable {
  constructor(private readonly settings: ServerConnection.ISettings) {
    this.poll = new Poll({
      name: 'nbdist:server',
      factory: () => this.ask(),
      frequency: { interval: 2_000, backoff: true, max: LONGEST_WAIT_MS },
      // Hidden pages poll while there are clusters, for the news of runs.
      standby: () => (this.clusters.length > 0 ? 'never' : 'when-hidden')
    });
  }

  clusters: readonly IClusterState[] = [];
  /** Runs, newest first. */
  runs: readonly IRunState[] = [];
  refused: Refused = {};
  trouble: Trouble = 'none';

  /** Emitted when clusters, runs or `trouble` change. */
  get changed(): ISignal<this, void> {
    return this.signal;
  }

  get isDisposed(): boolean {
    return this.poll.isDisposed;
  }

  get running(): readonly IRunState[] {
    return this.runs.filter(run => isOpen(run.status));
  }

  /** Return the cluster of a kernel. */
  clusterOf(kernel: string): IClusterState | undefined {
    return this.clusters.find(cluster => kernel !== '' && cluster.kernel === kernel);
  }

  /** Return the active run on the cluster of a kernel. */
  runOf(kernel: string): IRunState | undefined {
    const id = this.clusterOf(kernel)?.run ?? '';
    return this.running.find(run => run.id === id);
  }

  setInterval(seconds: number): void {
    this.poll.frequency = { ...this.poll.frequency, interval: 1_000 * seconds };
  }

  /** Return the HTML of the last `%dist_show` on a cluster. */
  async placement(cluster: string): Promise<string> {
    const path = `nbdist/clusters/${encodeURIComponent(cluster)}/placement`;
    return (await request(this.settings, path)).text();
  }

  /** Poll now. Resolves when the response has arrived. */
  async refresh(): Promise<void> {
    await this.poll.refresh();
    await this.poll.tick;
  }

  dispose(): void {
    this.poll.dispose();
    Signal.clearData(this);
  }

  private async ask(): Promise<void> {
    try {
      const [clusters, { runs, refused }] = await Promise.all([
        this.get<readonly IClusterState[]>('nbdist/clusters'),
        this.get<IRunList>('nbdist/runs')
      ]);
      this.set(clusters, runs, refused, 'none');
    } catch (error) {
      const isResponse = error instanceof ServerConnection.ResponseError;
      const unserved = isResponse && error.response.status === 404;
      this.set([], this.runs, this.refused, unserved ? 'unserved' : 'unreachable');
      throw error; // makes the poll back off
    }
  }

  private async get<T>(path: string): Promise<T> {
    return (await (await request(this.settings, path)).json()) as T;
  }

  private set(
    clusters: readonly IClusterState[],
    runs: readonly IRunState[],
    refused: Refused,
    trouble: Trouble
  ): void {
    const now = JSON.stringify([clusters, runs, refused, trouble]);
    if (now !== this.last && !this.isDisposed) {
      this.last = now;
      this.clusters = clusters;
      this.runs = runs;
      this.refused = refused;
      this.trouble = trouble;
      this.signal.emit();
    }
  }

  private last = '';
  private readonly poll: Poll<void>;
  private readonly signal = new Signal<this, void>(this);
}
