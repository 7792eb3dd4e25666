import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { NO_SUCH_RUN, RUN_IS_GONE } from './records';
import type { ServerMessage, StopRun } from './records';
import { RunModel } from './run/model';
import { isOpen } from './run/status';

const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 15_000;

/** After an ended run has been quiet for so long, nothing follows. */
const QUIET_MS = 3_000;

const STOP: StopRun = { type: 'StopRun' };

/** Somebody's look at a run; disposed of when they look away. */
export interface Watch extends IDisposable {
  readonly model: RunModel;
  /** End the run at the end of a step; settles when that was said, or the run has ended. */
  stop(): Promise<void>;
}

/** The runs that this page watches: one socket for each, however many look. */
export class LiveRuns {
  constructor(private readonly settings: ServerConnection.ISettings) {}

  watch(id: string): Watch {
    let live = this.open.get(id);
    if (live === undefined) {
      live = new LiveRun(id, this.settings);
      this.open.set(id, live);
    }
    return new Look(live, () => this.look(id));
  }

  /** Stop a run that nobody need be looking at. */
  async stop(id: string): Promise<void> {
    const watch = this.watch(id);
    try {
      await watch.stop();
    } finally {
      watch.dispose();
    }
  }

  private look(id: string): void {
    const live = this.open.get(id);
    if (live !== undefined && live.looks === 0) {
      this.open.delete(id);
      live.dispose();
    }
  }

  private readonly open = new Map<string, LiveRun>();
}

class Look implements Watch {
  constructor(
    private readonly live: LiveRun,
    private readonly leave: () => void
  ) {
    live.looks += 1;
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
      this.live.looks -= 1;
      this.leave();
    }
  }
}

/** One run's socket, opened again as long as there is a run. */
class LiveRun implements IDisposable {
  constructor(
    private readonly id: string,
    private readonly settings: ServerConnection.ISettings
  ) {
    this.connect();
  }

  readonly model = new RunModel();
  looks = 0;
  isDisposed = false;

  stop(): Promise<void> {
    return new Promise(resolve => {
      this.stops.push(resolve);
      this.sendStops();
    });
  }

  dispose(): void {
    this.isDisposed = true;
    this.end();
  }

  private connect(): void {
    const socket = new this.settings.WebSocket(this.url());
    let opened = false;
    socket.binaryType = 'arraybuffer';
    socket.onopen = () => {
      opened = true;
      this.model.reset();
      this.model.onConnection('live');
      this.sendStops();
    };
    socket.onmessage = event => this.hear(event.data as string | ArrayBuffer);
    socket.onclose = event => void this.closed(event.code, opened);
    this.socket = socket;
  }

  private url(): string {
    const { wsUrl, token, appendToken } = this.settings;
    const url = URLExt.join(wsUrl, 'nbdist/runs', encodeURIComponent(this.id), 'live');
    return appendToken && token !== '' ? `${url}?token=${encodeURIComponent(token)}` : url;
  }

  private hear(data: string | ArrayBuffer): void {
    this.wait_ms = FIRST_WAIT_MS;
    if (typeof data === 'string') {
      this.understand(JSON.parse(data) as ServerMessage);
    } else {
      this.model.onRows(new Float64Array(data));
    }
    this.closeWhenQuiet();
  }

  private understand(message: ServerMessage): void {
    switch (message.type) {
      case 'StateMessage':
        return this.model.onState(message.state);
      case 'TableMessage':
        return this.model.onTable(message.table);
      case 'CaughtUp':
        return this.model.onCaughtUp();
    }
  }

  private closeWhenQuiet(): void {
    window.clearTimeout(this.timer);
    if (this.model.state !== null && !isOpen(this.model.state.status)) {
      this.timer = window.setTimeout(() => this.settle('saved'), QUIET_MS);
    }
  }

  private async closed(code: number, opened: boolean): Promise<void> {
    this.socket = null;
    window.clearTimeout(this.timer);
    const gone = code === NO_SUCH_RUN || code === RUN_IS_GONE;
    if (gone || (!opened && (await this.isUnserved()))) {
      this.settle('gone');
    } else if (!this.isDisposed) {
      this.model.onConnection('reconnecting');
      this.timer = window.setTimeout(() => this.connect(), this.wait_ms);
      this.wait_ms = Math.min(2 * this.wait_ms, LONGEST_WAIT_MS);
    }
  }

  /** Whether the server has no nbdist; one that does not answer may come back. */
  private async isUnserved(): Promise<boolean> {
    const url = URLExt.join(this.settings.baseUrl, 'nbdist/runs');
    try {
      const response = await ServerConnection.makeRequest(url, {}, this.settings);
      return response.status === 404;
    } catch (error) {
      if (error instanceof ServerConnection.NetworkError) {
        return false;
      }
      throw error;
    }
  }

  /** Nothing more will come. */
  private settle(connection: 'gone' | 'saved'): void {
    if (!this.isDisposed) {
      this.end();
      this.model.onConnection(connection);
    }
  }

  private end(): void {
    window.clearTimeout(this.timer);
    if (this.socket !== null) {
      this.socket.onopen = this.socket.onmessage = this.socket.onclose = null;
      this.socket.close();
      this.socket = null;
    }
    this.settleStops();
  }

  private sendStops(): void {
    if (this.socket?.readyState === WebSocket.OPEN && this.stops.length > 0) {
      this.socket.send(JSON.stringify(STOP));
      this.settleStops();
    }
  }

  private settleStops(): void {
    this.stops.splice(0).forEach(settle => settle());
  }

  private socket: WebSocket | null = null;
  private timer = 0;
  private wait_ms = FIRST_WAIT_MS;
  private readonly stops: (() => void)[] = [];
}
