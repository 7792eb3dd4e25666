import type { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import type { IColumns, IRunState, ServerMessage } from '../records';
import { RunSocket } from '../socket';

/** What is told of a run's text. */
export interface ITextListener {
  onState(state: IRunState): void;
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
    run: string,
    settings: ServerConnection.ISettings,
    private readonly listener: ITextListener
  ) {
    this.socket = new RunSocket(run, 'text', settings, {
      onOpen: () => (this.repeated = this.heard),
      onMessage: message => this.hear(message),
      onRows: () => undefined, // none are asked for
      onBroken: () => undefined,
      onEnd: () => listener.onEnd()
    });
  }

  get isDisposed(): boolean {
    return this.socket.isDisposed;
  }

  dispose(): void {
    this.socket.dispose();
  }

  private hear(message: ServerMessage): void {
    switch (message.type) {
      case 'StateMessage':
        return this.listener.onState(message.state);
      case 'TableMessage':
        return this.hearTable(message.table.columns);
      case 'TextMessage':
        return this.hearText(message.text);
    }
  }

  private hearTable({ own, shared }: IColumns): void {
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

  private heard = 0;
  private repeated = 0;
  private readonly socket: RunSocket;
}
