import type { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import type { IColumns, IRunState, ServerMessage } from '../records';
import { ofRun, RunSocket } from '../socket';

/** Callbacks for the text of a run. */
export interface ITextListener {
  onState(state: IRunState): void;
  /** Reports for a chart exist. Called before later text. */
  onReports(): void;
  /** Text that follows the text of the last call. */
  onText(text: string): void;
  /** The text is complete. Not called after the text is disposed of. */
  onEnd(): void;
}

/** Text output of a cell from its beginning, read through the Jupyter server. */
export class RunText implements IDisposable {
  constructor(
    run: string,
    settings: ServerConnection.ISettings,
    private readonly listener: ITextListener
  ) {
    this.socket = new RunSocket(ofRun(run, 'text'), settings, {
      onOpen: () => (this.repeated = this.received),
      onMessage: message => this.onMessage(message),
      onRows: () => undefined, // rows are not requested
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

  private onMessage(message: ServerMessage): void {
    switch (message.type) {
      case 'StateMessage':
        return this.listener.onState(message.state);
      case 'TableMessage':
        return this.onTable(message.table.columns);
      case 'TextMessage':
        return this.onText(message.text);
    }
  }

  private onTable({ own, shared }: IColumns): void {
    if (own.length + shared.length > 0) {
      this.listener.onReports();
    }
  }

  /** Skip text that an earlier socket delivered: each socket starts at the beginning. */
  private onText(text: string): void {
    const fresh = text.slice(this.repeated);
    this.repeated -= text.length - fresh.length;
    this.received += fresh.length;
    if (fresh !== '') {
      this.listener.onText(fresh);
    }
  }

  private received = 0;
  private repeated = 0;
  private readonly socket: RunSocket;
}
