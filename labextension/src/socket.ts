import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { NO_SUCH_RUN, RUN_IS_GONE } from './records';
import type { ServerMessage, IStopRun } from './records';
import { isOpen } from './run/status';

const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 15_000;

/** After an ended run has been quiet for so long, nothing follows: the server looks each second. */
const QUIET_MS = 2_500;

/** Why nothing more comes: the run, or nbdist, is not on the server; or all of it was sent. */
export type Ending = 'gone' | 'saved';

/** What is told of a run; nothing once its socket is disposed of. */
export interface ISocketListener {
  /** The server is there, and begins at the run's beginning, again if it was there before. */
  onOpen(): void;
  onMessage(message: ServerMessage): void;
  /** Rows after their table's number. */
  onRows(values: Float64Array): void;
  /** The connection broke; another is tried. */
  onBroken(): void;
  onEnd(ending: Ending): void;
}

/** What the server says of one run: a WebSocket, opened again as long as more may come. */
export class RunSocket implements IDisposable {
  /**
   * @param what its rows, or what its cell shows as text.
   */
  constructor(
    private readonly run: string,
    private readonly what: 'rows' | 'text',
    private readonly settings: ServerConnection.ISettings,
    private readonly listener: ISocketListener
  ) {
    this.connect();
  }

  isDisposed = false;

  /** Whether it could be said: there is a connection. */
  send(message: IStopRun): boolean {
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
    socket.onmessage = event => this.hear(event.data as string | ArrayBuffer);
    socket.onclose = event => void this.closed(event.code, opened);
    this.socket = socket;
  }

  private url(): string {
    const { wsUrl, token, appendToken } = this.settings;
    const url = URLExt.join(wsUrl, 'nbdist/runs', encodeURIComponent(this.run), 'live');
    const text: Record<string, string> = this.what === 'text' ? { text: '1' } : {};
    const access: Record<string, string> = appendToken && token !== '' ? { token } : {};
    return url + URLExt.objectToQueryString({ ...text, ...access });
  }

  private hear(data: string | ArrayBuffer): void {
    this.wait_ms = FIRST_WAIT_MS;
    if (typeof data === 'string') {
      this.understand(JSON.parse(data) as ServerMessage);
    } else {
      this.listener.onRows(new Float64Array(data));
    }
    if (this.isOver && !this.isDisposed) {
      window.clearTimeout(this.timer);
      this.timer = window.setTimeout(() => this.end('saved'), QUIET_MS);
    }
  }

  private understand(message: ServerMessage): void {
    if (message.type === 'StateMessage') {
      this.isOver = !isOpen(message.state.status);
    }
    this.listener.onMessage(message);
  }

  private async closed(code: number, opened: boolean): Promise<void> {
    this.socket = null;
    window.clearTimeout(this.timer);
    const gone = code === NO_SUCH_RUN || code === RUN_IS_GONE;
    if (gone || (!opened && (await this.isUnserved()))) {
      this.end('gone');
    } else if (!this.isDisposed) {
      this.listener.onBroken();
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

  private end(ending: Ending): void {
    if (!this.isDisposed) {
      this.dispose();
      this.listener.onEnd(ending);
    }
  }

  private isOver = false;
  private socket: WebSocket | null = null;
  private timer = 0;
  private wait_ms = FIRST_WAIT_MS;
}
