import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { Poll } from '@lumino/polling';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import type { IClusterState, IRunState } from '../records';
import { isOpen } from '../run/status';

const LONGEST_WAIT_MS = 60_000;

/** Why there is no news from the server: it has no nbdist, or it does not answer. */
export type Trouble = 'none' | 'unserved' | 'unreachable';

/** What the server knows of clusters and runs, asked for again and again. */
export class ServerModel implements IDisposable {
  constructor(private readonly settings: ServerConnection.ISettings) {
    this.poll = new Poll({
      name: 'nbdist:server',
      factory: () => this.ask(),
      frequency: { interval: 2_000, backoff: true, max: LONGEST_WAIT_MS },
      standby: 'when-hidden'
    });
  }

  clusters: readonly IClusterState[] = [];
  /** Newest first. */
  runs: readonly IRunState[] = [];
  trouble: Trouble = 'none';

  /** Emitted when any of it changed. */
  get changed(): ISignal<this, void> {
    return this.signal;
  }

  get isDisposed(): boolean {
    return this.poll.isDisposed;
  }

  get running(): readonly IRunState[] {
    return this.runs.filter(run => isOpen(run.status));
  }

  /** The cluster of a notebook's kernel. */
  clusterOf(kernel: string): IClusterState | undefined {
    return this.clusters.find(cluster => kernel !== '' && cluster.kernel === kernel);
  }

  /** The run that is under way on the cluster of a notebook's kernel. */
  runOf(kernel: string): IRunState | undefined {
    const id = this.clusterOf(kernel)?.run ?? '';
    return this.running.find(run => run.id === id);
  }

  setInterval(seconds: number): void {
    this.poll.frequency = { ...this.poll.frequency, interval: 1_000 * seconds };
  }

  /** The HTML of what `%dist_show` showed last on a cluster. */
  async placement(cluster: string): Promise<string> {
    return (await this.request(`nbdist/clusters/${encodeURIComponent(cluster)}/placement`)).text();
  }

  /** Ask now; settles when the answer is in. */
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
      const [clusters, runs] = await Promise.all([
        this.get<readonly IClusterState[]>('nbdist/clusters'),
        this.get<readonly IRunState[]>('nbdist/runs')
      ]);
      this.set(clusters, runs, 'none');
    } catch (error) {
      const refused = error instanceof ServerConnection.ResponseError;
      const unserved = refused && error.response.status === 404;
      this.set([], this.runs, unserved ? 'unserved' : 'unreachable');
      throw error; // so that the next time is later
    }
  }

  private async get<T>(path: string): Promise<T> {
    return (await (await this.request(path)).json()) as T;
  }

  private async request(path: string): Promise<Response> {
    const url = URLExt.join(this.settings.baseUrl, path);
    const response = await ServerConnection.makeRequest(url, {}, this.settings);
    if (!response.ok) {
      throw await ServerConnection.ResponseError.create(response);
    }
    return response;
  }

  private set(
    clusters: readonly IClusterState[],
    runs: readonly IRunState[],
    trouble: Trouble
  ): void {
    const now = JSON.stringify([clusters, runs, trouble]);
    if (now !== this.last && !this.isDisposed) {
      this.last = now;
      this.clusters = clusters;
      this.runs = runs;
      this.trouble = trouble;
      this.signal.emit();
    }
  }

  private last = '';
  private readonly poll: Poll<void>;
  private readonly signal = new Signal<this, void>(this);
}
