import type { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import type { IRunState, Media, ServerMessage, IStopRun } from './records';
import { RunModel } from './run/model';
import { isJob } from './run/status';
import { request } from './server';
import type { Ending } from './socket';
import { ofRun, RunSocket } from './socket';

const STOP: IStopRun = { type: 'StopRun' };

/** Subscription of a view to a run. Dispose of it when the view closes. */
export interface IWatch extends IDisposable {
  readonly model: RunModel;
  /**
   * Ask the run to stop after the current step, or cancel its job. Resolves once this was sent or
   * is moot, to false if the job cannot be cancelled. The user then sees the reason.
   */
  stop(): Promise<boolean>;
  /** Load a content by its number in the index of the run. */
  loadMedia(number: number): Promise<Media>;
}

/** Connections of this page to runs: one socket per run, shared by all views. */
export class LiveRuns {
  /**
   * Args:
   *   settings: those of the Jupyter server.
   *   onRefused: shows the reason why a job cannot be stopped.
   */
  constructor(
    readonly settings: ServerConnection.ISettings,
    private readonly onRefused: (error: Error) => void
  ) {}

  watch(id: string): IWatch {
    let live = this.open.get(id);
    if (live === undefined) {
      live = new LiveRun(id, this.settings, () => this.stopJob(id));
      this.open.set(id, live);
    }
    const load = (number: number): Promise<Media> => this.loadMedia(id, number);
    return new Watch(live, load, () => this.closeUnwatched(id));
  }

  /** Stop a run, with or without an open view. */
  async stop(run: IRunState): Promise<void> {
    if (isJob(run)) {
      await this.stopJob(run.id);
      return;
    }
    const watch = this.watch(run.id);
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

  /** Cancel the job of a run. Returns false if the server cannot. */
  private async stopJob(id: string): Promise<boolean> {
    const path = `nbdist/runs/${encodeURIComponent(id)}/stop`;
    try {
      await request(this.settings, path, { method: 'POST' });
    } catch (error) {
      this.onRefused(error as Error);
      return false;
    }
    return true;
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

  stop(): Promise<boolean> {
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
  constructor(
    id: string,
    settings: ServerConnection.ISettings,
    private readonly stopJob: () => Promise<boolean>
  ) {
    this.socket = new RunSocket(ofRun(id, 'rows'), settings, {
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

  async stop(): Promise<boolean> {
    const { state } = this.model;
    if (state !== null && isJob(state)) {
      return this.stopJob();
    }
    await new Promise<void>(resolve => {
      this.stops.push(resolve);
      this.sendStops();
    });
    return true;
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
