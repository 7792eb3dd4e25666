import { URLExt } from '@jupyterlab/coreutils';
import type { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import type { Columns, RunState, ServerMessage } from '../records';
import { NO_SUCH_RUN, RUN_IS_GONE } from '../records';
import { isOpen } from '../run/status';

const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 15_000;

/** After an ended run has been quiet for so long, nothing follows: the server looks each second. */
const QUIET_MS = 2_500;

/** What is told of a run's text. */
export interface TextListener {
  onState(state: RunState): void;
  /** There is something for a chart; called before text that came after it. */
  onReports(): void;
  /** More text, on from the last. */
  onText(text: string): void;
  /** Nothing more will come; not called once the text is disposed of. */
  onEnd(): void;
}

/** What a cell shows as text, from its beginning, through the Jupyter server. */
export class RunText implements IDisposable {
  constructor(
    private readonly run: string,
    private readonly settings: ServerConnection.ISettings,
    private readonly listener: TextListener
  ) {
    this.connect();
  }

  isDisposed = false;

  dispose(): void {
    this.isDisposed = true;
    window.clearTimeout(this.timer);
    if (this.socket !== null) {
      this.socket.onmessage = this.socket.onclose = null;
      this.socket.close();
      this.socket = null;
    }
  }

  private connect(): void {
    const socket = new this.settings.WebSocket(this.url());
    this.repeated = this.heard;
    socket.onmessage = event => this.hear(JSON.parse(event.data as string) as ServerMessage);
    socket.onclose = event => this.closed(event.code);
    this.socket = socket;
  }

  private url(): string {
    const { wsUrl, token, appendToken } = this.settings;
    const url = URLExt.join(wsUrl, 'nbdist/runs', encodeURIComponent(this.run), 'live?text=1');
    return appendToken && token !== '' ? `${url}&token=${encodeURIComponent(token)}` : url;
  }

  private hear(message: ServerMessage): void {
    this.wait_ms = FIRST_WAIT_MS;
    if (message.type === 'StateMessage') {
      this.over = !isOpen(message.state.status);
      this.listener.onState(message.state);
    } else if (message.type === 'TableMessage') {
      this.hearTable(message.table.columns);
    } else if (message.type === 'TextMessage') {
      this.hearText(message.text);
    }
    if (this.over && !this.isDisposed) {
      window.clearTimeout(this.timer);
      this.timer = window.setTimeout(() => this.end(), QUIET_MS);
    }
  }

  private hearTable({ own, shared }: Columns): void {
    if (own.length + shared.length > 0) {
      this.listener.onReports();
    }
  }

  /** A socket begins at the beginning: what an earlier one brought is skipped. */
  private hearText(text: string): void {
    const fresh = text.slice(this.repeated);
    this.repeated -= text.length - fresh.length;
    this.heard += fresh.length;
    if (fresh !== '') {
      this.listener.onText(fresh);
    }
  }

  private closed(code: number): void {
    this.socket = null;
    if (code === NO_SUCH_RUN || code === RUN_IS_GONE) {
      this.end();
    } else if (!this.over) {
      this.timer = window.setTimeout(() => this.connect(), this.wait_ms);
      this.wait_ms = Math.min(2 * this.wait_ms, LONGEST_WAIT_MS);
    }
  }

  private end(): void {
    this.dispose();
    this.listener.onEnd();
  }

  private heard = 0;
  private repeated = 0;
  private over = false;
  private socket: WebSocket | null = null;
  private timer = 0;
  private wait_ms = FIRST_WAIT_MS;
}
