import type { IDisposable } from '@lumino/disposable';
import { Throttler } from '@lumino/polling';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import type { LiveRuns, IWatch } from '../live';
import type { IRunState } from '../records';
import type { IFigures } from '../run/figures';
import { figures } from '../run/figures';
import { RunModel } from '../run/model';
import type { ServerModel } from './model';

/** Interval between updates of the figures. */
const SHOWN_EVERY_MS = 500;

const SILENT = new RunModel();

interface IFollowed {
  readonly watch: IWatch;
  readonly stopListening: () => void;
}

/** Follow the active runs for views that show one line per run. */
export class RunningFigures implements IDisposable {
  constructor(
    private readonly server: ServerModel,
    private readonly runs: LiveRuns
  ) {
    server.changed.connect(this.follow, this);
    this.follow();
  }

  isDisposed = false;

  get changed(): ISignal<this, void> {
    return this.signal;
  }

  /** Return the current figures of a run. They are NaN if the run is not active. */
  of(id: string): IFigures {
    return figures(this.followed.get(id)?.watch.model ?? SILENT, Date.now() / 1000);
  }

  /** Return the last received state of an active run. */
  stateOf(id: string): IRunState | null {
    return this.followed.get(id)?.watch.model.state ?? null;
  }

  dispose(): void {
    this.isDisposed = true;
    this.followed.forEach((_, id) => this.leave(id));
    this.throttler.dispose();
    Signal.clearData(this);
  }

  private follow(): void {
    const ids = new Set(this.server.running.map(run => run.id));
    [...this.followed.keys()].filter(id => !ids.has(id)).forEach(id => this.leave(id));
    [...ids].filter(id => !this.followed.has(id)).forEach(id => this.join(id));
  }

  private join(id: string): void {
    const watch = this.runs.watch(id);
    const stopListening = watch.model.subscribe(() => void this.throttler.invoke());
    this.followed.set(id, { watch, stopListening });
  }

  private leave(id: string): void {
    const followed = this.followed.get(id);
    followed?.stopListening();
    followed?.watch.dispose();
    this.followed.delete(id);
  }

  private readonly followed = new Map<string, IFollowed>();
  private readonly signal = new Signal<this, void>(this);
  private readonly throttler = new Throttler(() => this.signal.emit(), {
    limit: SHOWN_EVERY_MS,
    edge: 'trailing'
  });
}
