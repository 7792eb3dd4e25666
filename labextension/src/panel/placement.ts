import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import type { IClusterState, IShownPlacement } from '../records';
import type { ServerModel } from './model';

/** Last `%dist_show` output of a cluster. Fetched again after each new one. */
export class LastPlacement implements IDisposable {
  constructor(
    private readonly server: ServerModel,
    private readonly id: string
  ) {
    server.changed.connect(this.update, this);
    this.update();
  }

  isDisposed = false;
  /** Untrusted HTML of the server. */
  html = '';
  /** Description of `html`. Null before the first output. It remains after the cluster stops. */
  shown: IShownPlacement | null = null;
  /** The latest output could not be fetched. */
  failed = false;

  /** Emitted when the output or the cluster changes. */
  get changed(): ISignal<this, void> {
    return this.signal;
  }

  get cluster(): IClusterState | undefined {
    return this.server.clusters.find(cluster => cluster.id === this.id);
  }

  /** The workers that had the shown arrays were replaced or resized, or have ended. */
  get stale(): boolean {
    const pids = this.cluster?.workers.map(worker => worker.pid) ?? [];
    return this.shown !== null && this.shown.pids.join() !== pids.join();
  }

  dispose(): void {
    this.isDisposed = true;
    Signal.clearData(this);
  }

  private update(): void {
    const newest = this.cluster?.placement ?? null;
    if (newest !== null && newest.at !== this.asked) {
      this.asked = newest.at;
      void this.fetch(newest);
    }
    this.signal.emit();
  }

  private async fetch(newest: IShownPlacement): Promise<void> {
    const html = await this.server.placement(this.id).catch(() => null);
    if (this.isDisposed || this.asked !== newest.at) {
      return; // a newer output is being fetched
    }
    this.failed = html === null;
    if (html === null) {
      this.asked = 0; // retry with the next change of the server
    } else {
      this.html = html;
      this.shown = newest;
    }
    this.signal.emit();
  }

  private asked = 0;
  private readonly signal = new Signal<this, void>(this);
}
