import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { NO_SUCH_RUN, RUN_IS_GONE, UNREADABLE_RUN } from './records';
import type { ServerMessage, IRequestStack, IStopRun } from './records';
import { isOpen } from './run/status';

const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 15_000;

/** An ended run that was quiet for this long is complete: the server polls every second. */
const QUIET_MS = 2_500;

/**
 * End of a connection: the run or nbdist is missing on the server, the server cannot read the run,
 * or all data was received.
 */
export type Ending = 'gone' | 'unreadable' | 'saved';

/** Callbacks of a run's socket. None is called after the socket is disposed of. */
export interface ISocketListener {
  /** The socket is open. The server sends the run from its beginning, also after a reconnection. */
  onOpen(): void;
  onMessage(message: ServerMessage): void;
  /** Rows, preceded by the number of their table. */
  onRows(values: Float64Array): void;
  /** The connection was lost. The socket reconnects. */
  onBroken(): void;
  /** @param reason the reason why the server cannot read the run, else empty. */
  onEnd(ending: Ending, reason: string): void;
}

/** Address of a socket: its path below `nbdist` on the server, and its query. */
export interface IAddress {
  readonly path: readonly string[];
  readonly query: Readonly<Record<string, string>>;
}

/** Return the address of the rows of a run, the text of its cell, or that of the worker of a rank. */
export function ofRun(run: string, what: 'rows' | 'text' | number): IAddress {
  const part = typeof what === 'number' ? { rank: String(what) } : {};
  const text = what === 'text' ? { text: '1' } : {};
  return { path: ['runs', run, 'live'], query: { ...part, ...text } };
}

/** Return the address of the text of all cells of a worker of a cluster. */
export function ofWorker(cluster: string, rank: number): IAddress {
  return { path: ['clusters', cluster, 'workers', String(rank), 'live'], query: {} };
}

/** WebSocket to the server. Reconnects until a run is complete. */
export class RunSocket implements IDisposable {
  constructor(
    private readonly address: IAddress,
    private readonly settings: ServerConnection.ISettings,
    private readonly listener: ISocketListener
  ) {
    this.connect();
  }

  isDisposed = false;

  /** Send a message. Returns false if there is no connection. */
  send(message: IStopRun | IRequestStack): boolean {
    const isConnected = this.socket?.readyState === WebSocket.OPEN;
    if (isConnected) {
      this.socket?.send(JSON.stringify(message));
    }
    return isConnected;
  }

  dispose(): void {
    this.isDisposed = true;
    window.clearTimeout(this.timer);
    if (this.socket !== null) {
      this.socket.onopen = this.socket.onmessage = this.socket.onclose = null;
      this.socket.close();
      this.socket = null;
    }
  }

  private connect(): void {
    const socket = new this.settings.WebSocket(this.url());
    let opened = false;
    socket.binaryType = 'arraybuffer';
    socket.onopen = () => {
      opened = true;
      this.listener.onOpen();
    };
    socket.onmessage = event => this.receive(event.data as string | ArrayBuffer);
    socket.onclose = event => void this.closed(event, opened);
    this.socket = socket;
  }

  private url(): string {
    const { wsUrl, token, appendToken } = this.settings;
    const { path, query } = this.address;
    const url = URLExt.join(wsUrl, 'nbdist', ...path.map(encodeURIComponent));
    const access: Record<string, string> = appendToken && token !== '' ? { token } : {};
    return url + URLExt.objectToQueryString({ ...query, ...access });
  }

  private receive(data: string | ArrayBuffer): void {
    this.wait_ms = FIRST_WAIT_MS;
    if (typeof data === 'string') {
      this.handle(JSON.parse(data) as ServerMessage);
    } else {
      this.listener.onRows(new Float64Array(data));
    }
    if (this.isOver && !this.isDisposed) {
      window.clearTimeout(this.timer);
      this.timer = window.setTimeout(() => this.end('saved'), QUIET_MS);
    }
  }

  private handle(message: ServerMessage): void {
    if (message.type === 'StateMessage') {
      this.isOver = !isOpen(message.state.status);
    }
    this.listener.onMessage(message);
  }

  private async closed({ code, reason }: CloseEvent, opened: boolean): Promise<void> {
    this.socket = null;
    window.clearTimeout(this.timer);
    const gone = code === NO_SUCH_RUN || code === RUN_IS_GONE;
    if (code === UNREADABLE_RUN) {
      this.end('unreadable', reason);
    } else if (gone || (!opened && (await this.isUnserved()))) {
      this.end('gone');
    } else if (!this.isDisposed) {
      this.listener.onBroken();
      this.timer = window.setTimeout(() => this.connect(), this.wait_ms);
      this.wait_ms = Math.min(2 * this.wait_ms, LONGEST_WAIT_MS);
    }
  }

  /** Return true if the server has no nbdist. A server that does not respond may recover. */
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

  private end(ending: Ending, reason = ''): void {
    if (!this.isDisposed) {
      this.dispose();
      this.listener.onEnd(ending, reason);
    }
  }

  private isOver = false;
  private socket: WebSocket | null = null;
  private timer = 0;
  private wait_ms = FIRST_WAIT_MS;
}
