import type { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { Poll } from '@lumino/polling';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import type { IAnnotations, IRunCurve, IRunRow, IRunTable } from '../records';
import { request } from '../server';

const INTERVAL_MS = 3_000;
const LONGEST_WAIT_MS = 60_000;

/** All stored runs of the server, polled while the page is visible. */
export class RunsModel implements IDisposable {
  constructor(private readonly settings: ServerConnection.ISettings) {
    this.poll = new Poll({
      name: 'nbdist:runs',
      factory: () => this.read(),
      frequency: { interval: INTERVAL_MS, backoff: true, max: LONGEST_WAIT_MS },
      standby: 'when-hidden'
    });
  }

  /** Runs, newest first. Null before the first response. */
  rows: readonly IRunRow[] | null = null;
  /** The server did not respond to the last request. */
  failed = false;

  get changed(): ISignal<this, void> {
    return this.signal;
  }

  get isDisposed(): boolean {
    return this.poll.isDisposed;
  }

  /** Store edits of a run. Throws an error if the server refuses them. */
  async annotate(id: string, change: Partial<IAnnotations>): Promise<void> {
    const init = { method: 'PATCH', body: JSON.stringify(change) };
    const response = await request(this.settings, path(id), init);
    const annotations = (await response.json()) as IAnnotations;
    const rows = this.rows ?? [];
    this.set(rows.map(row => (row.state.id === id ? { ...row, annotations } : row)));
  }

  /** Delete an ended run. Throws an error if the server refuses it. */
  async remove(id: string): Promise<void> {
    await request(this.settings, path(id), { method: 'DELETE' });
    this.set((this.rows ?? []).filter(row => row.state.id !== id));
  }

  /** Return the cells of the cluster up to the run, in percent format. */
  async cells(id: string): Promise<string> {
    return (await request(this.settings, `${path(id)}/cells`)).text();
  }

  async curve(id: string, metric: string): Promise<IRunCurve> {
    const query = `metric=${encodeURIComponent(metric)}`;
    const response = await request(this.settings, `${path(id)}/curve?${query}`);
    return (await response.json()) as IRunCurve;
  }

  dispose(): void {
    this.poll.dispose();
    Signal.clearData(this);
  }

  private async read(): Promise<void> {
    try {
      const text = await (await request(this.settings, 'nbdist/runs/table')).text();
      if (text !== this.last || this.failed) {
        this.last = text;
        this.failed = false;
        this.set((JSON.parse(text) as IRunTable).rows);
      }
    } catch (error) {
      this.failed = true;
      this.signal.emit();
      throw error; // makes the poll back off
    }
  }

  private set(rows: readonly IRunRow[]): void {
    this.rows = rows;
    if (!this.isDisposed) {
      this.signal.emit();
    }
  }

  private last = '';
  private readonly poll: Poll<void>;
  private readonly signal = new Signal<this, void>(this);
}

function path(id: string): string {
  return `nbdist/runs/${encodeURIComponent(id)}`;
}
