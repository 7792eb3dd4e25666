import type { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import type { IRunState, Media, ServerMessage, IStopRun } from './records';
import { RunModel } from './run/model';
import { request } from './server';
import type { Ending } from './socket';
import { RunSocket } from './socket';

const STOP: IStopRun = { type: 'StopRun' };

/** Subscription of a view to a run. Dispose of it when the view closes. */
export interface IWatch extends IDisposable {
  readonly model: RunModel;
  /** Ask the run to stop after the current step. Resolves once this was sent or is moot. */
  stop(): Promise<void>;
  /** Load a content by its number in the index of the run. */
  loadMedia(number: number): Promise<Media>;
}

/** Connections of this page to runs: one socket per run, shared by all views. */
export class LiveRuns {
  constructor(readonly settings: ServerConnection.ISettings) {}

  watch(id: string): IWatch {
    let live = this.open.get(id);
    if (live === undefined) {
      live = new LiveRun(id, this.settings);
      this.open.set(id, live);
    }
    const load = (number: number): Promise<Media> => this.loadMedia(id, number);
    return new Watch(live, load, () => this.closeUnwatched(id));
  }

  /** Stop a run, with or without an open view. */
  async stop(id: string): Promise<void> {
    const watch = this.watch(id);
    try {
      await watch.stop();
    } finally {
      watch.dispose();
    }
  }

  /** Set the current names of runs: users rename them. */
  rename(runs: readonly IRunState[]): void {
    runs.forEach(({ id, name }) => this.open.get(id)?.model.onName(name));
  }

  private async loadMedia(id: string, number: number): Promise<Media> {
    const path = `nbdist/runs/${encodeURIComponent(id)}/media/${number}`;
    return (await (await request(this.settings, path)).json()) as Media;
  }

  private closeUnwatched(id: string): void {
    const live = this.open.get(id);
    if (live !== undefined && live.watchers === 0) {
      this.open.delete(id);
      live.dispose();
    }
  }

  private readonly open = new Map<string, LiveRun>();
}

class Watch implements IWatch {
  constructor(
    private readonly live: LiveRun,
    readonly loadMedia: (number: number) => Promise<Media>,
    private readonly leave: () => void
  ) {
    live.watchers += 1;
  }

  isDisposed = false;

  get model(): RunModel {
    return this.live.model;
  }

  stop(): Promise<void> {
    return this.live.stop();
  }

  dispose(): void {
    if (!this.isDisposed) {
      this.isDisposed = true;
      this.live.watchers -= 1;
      this.leave();
    }
  }
}

/** Connection to one run and its model. */
class LiveRun implements IDisposable {
  constructor(id: string, settings: ServerConnection.ISettings) {
    this.socket = new RunSocket(id, 'rows', settings, {
      onOpen: () => this.opened(),
      onMessage: message => this.onMessage(message),
      onRows: values => this.model.onRows(values),
      onBroken: () => this.model.onConnection('reconnecting'),
      onEnd: (ending, reason) => this.ended(ending, reason)
    });
  }

  readonly model = new RunModel();
  watchers = 0;

  get isDisposed(): boolean {
    return this.socket.isDisposed;
  }

  stop(): Promise<void> {
    return new Promise(resolve => {
      this.stops.push(resolve);
      this.sendStops();
    });
  }

  dispose(): void {
    this.socket.dispose();
    this.settleStops();
  }

  private opened(): void {
    this.model.reset();
    this.model.onConnection('live');
    this.sendStops();
  }

  private onMessage(message: ServerMessage): void {
    switch (message.type) {
      case 'StateMessage':
        return this.model.onState(message.state);
      case 'TableMessage':
        return this.model.onTable(message.table);
      case 'MediaMessage':
        return this.model.onMedia(message.entries);
      case 'CaughtUp':
        return this.model.onCaughtUp();
    }
  }

  private ended(ending: Ending, reason: string): void {
    this.settleStops();
    this.model.onConnection(ending, reason);
  }

  /** Send the pending stop requests. Requests to an ended run are dropped. */
  private sendStops(): void {
    if (this.isDisposed || (this.stops.length > 0 && this.socket.send(STOP))) {
      this.settleStops();
    }
  }

  private settleStops(): void {
    this.stops.splice(0).forEach(settle => settle());
  }

  private readonly socket: RunSocket;
  private readonly stops: (() => void)[] = [];
}
