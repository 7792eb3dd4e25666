import type { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import type { IWorkerStack, ServerMessage } from '../records';
import type { IAddress } from '../socket';
import { RunSocket } from '../socket';

/** Longest text that the page keeps, in characters. */
const MOST_TEXT = 2 ** 21;

/** Text of one worker, and its last stack in a run, read through the Jupyter server. */
export class WorkerFeed implements IDisposable {
  constructor(
    address: IAddress,
    private readonly rank: number,
    settings: ServerConnection.ISettings
  ) {
    this.socket = new RunSocket(address, settings, {
      onOpen: () => (this.text = ''), // each socket starts at the beginning
      onMessage: message => this.onMessage(message),
      onRows: () => undefined, // rows are not requested
      onBroken: () => undefined,
      onEnd: () => this.changed()
    });
  }

  text = '';
  stack: IWorkerStack | null = null;

  get isDisposed(): boolean {
    return this.socket.isDisposed;
  }

  /** Ask for the current stack. Returns false if there is no connection. */
  requestStack(): boolean {
    return this.socket.send({ type: 'RequestStack', rank: this.rank });
  }

  /** Call `listener` after each change. Returns a function that unsubscribes. */
  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  dispose(): void {
    this.socket.dispose();
    this.listeners.clear();
  }

  private onMessage(message: ServerMessage): void {
    if (message.type === 'TextMessage') {
      this.text = (this.text + message.text).slice(-MOST_TEXT);
    } else if (message.type === 'StackMessage') {
      this.stack = message.stack;
    }
    this.changed();
  }

  private changed(): void {
    for (const listener of [...this.listeners]) {
      listener();
    }
  }

  private readonly listeners = new Set<() => void>();
  private readonly socket: RunSocket;
}
