import type { ISessionContext } from '@jupyterlab/apputils';
import { CodeCell } from '@jupyterlab/cells';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { KernelMessage, ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import type { ServerModel } from '../panel/model';
import type { IRunState } from '../records';
import { RevivedCell, isAnswer } from './cell';

/** From this on, cells have ids that stay the same when a notebook is opened again. */
const MINOR_WITH_IDS = 5;

/**
 * Looks whether the notebook's kernel is in a run that this page did not begin, and shows it.
 *
 * Only a page that came in the middle of a run does, and of the later runs: those were queued by
 * the page that is gone. To another page that is open, a notebook's execution is not shown, as ever.
 */
export class RevivedNotebook implements IDisposable {
  constructor(
    private readonly panel: NotebookPanel,
    private readonly tracker: INotebookTracker,
    private readonly server: ServerModel,
    private readonly settings: ServerConnection.ISettings
  ) {
    panel.sessionContext.kernelChanged.connect(this.begin, this);
    panel.sessionContext.iopubMessage.connect(this.hear, this);
    server.changed.connect(this.look, this);
    void panel.context.ready.then(() => this.begin());
  }

  isDisposed = false;

  dispose(): void {
    this.isDisposed = true;
    this.leave();
    this.panel.sessionContext.kernelChanged.disconnect(this.begin, this);
    this.panel.sessionContext.iopubMessage.disconnect(this.hear, this);
    this.server.changed.disconnect(this.look, this);
  }

  /** The page has come to the notebook's kernel. */
  private begin(): void {
    this.leave();
    if (this.kernel !== '' && this.panel.context.isReady) {
      this.follows = this.isNew = true;
      this.look();
      void this.server.refresh().finally(() => {
        this.look();
        this.leaveEarly();
        this.follows = this.cells.size > 0 || document.hidden; // the server is not asked while it is
      });
    }
  }

  private look(): void {
    if (this.follows && !this.isDisposed) {
      this.runs().forEach(run => this.revive(run));
    }
  }

  /** What the kernel is in, be it over: its picture is still to come. And what spoke meanwhile. */
  private runs(): readonly IRunState[] {
    const id = this.server.clusterOf(this.kernel)?.run ?? '';
    const spoke = (run: IRunState): boolean => this.early.some(message => isAnswer(message, run));
    return this.server.runs.filter(run => run.id === id || spoke(run));
  }

  private revive(run: IRunState): void {
    const cell = this.cells.has(run.id) ? undefined : this.cellOf(run);
    if (cell !== undefined && !cell.outputArea.future && !this.isOurs(run)) {
      const revived = new RevivedCell(this.panel, cell, run, this.settings);
      this.cells.set(run.id, revived);
      this.early.forEach(message => revived.hear(message));
    }
  }

  /** The server's answer may come later than the last words of the run. */
  private hear(_: ISessionContext, message: KernelMessage.IMessage): void {
    if (this.isNew) {
      this.early.push(message);
    }
  }

  private leaveEarly(): void {
    this.isNew = false;
    this.early.length = 0;
  }

  private get kernel(): string {
    return this.panel.sessionContext.session?.kernel?.id ?? '';
  }

  /** Whether this page began it: in this notebook, or in another view of it. */
  private isOurs(run: IRunState): boolean {
    const asks = (cell: CodeCell): boolean =>
      cell.outputArea.future?.msg.header.msg_id === run.request;
    return this.tracker.find(panel => codeCells(panel).some(asks)) !== undefined;
  }

  /** The cell that runs; by its first line where cells have no ids of their own. */
  private cellOf(run: IRunState): CodeCell | undefined {
    const { model } = this.panel;
    if (run.request === '' || model === null || model.collaborative) {
      return undefined; // whoever shares a notebook is given its outputs by the others
    }
    const cells = codeCells(this.panel);
    if (run.cell !== '' && (model.nbformat > 4 || model.nbformatMinor >= MINOR_WITH_IDS)) {
      return cells.find(cell => cell.model.id === run.cell);
    }
    const alike = cells.filter(cell => firstLine(cell) === words(run.header));
    return alike.filter(cell => cell.model.outputs.length === 0).at(-1) ?? alike.at(-1);
  }

  private leave(): void {
    this.cells.forEach(cell => cell.dispose());
    this.cells.clear();
    this.leaveEarly();
    this.follows = false;
  }

  private follows = false;
  /** The page has come, and the server has not been heard yet. */
  private isNew = false;
  /** What the kernel said since. */
  private readonly early: KernelMessage.IMessage[] = [];
  /** By their runs' ids; also those that are over. */
  private readonly cells = new Map<string, RevivedCell>();
}

function codeCells(panel: NotebookPanel): readonly CodeCell[] {
  return panel.content.widgets.filter(cell => cell instanceof CodeCell);
}

function firstLine(cell: CodeCell): string {
  return words(cell.model.sharedModel.getSource().trimStart().split('\n')[0] ?? '');
}

function words(line: string): string {
  return line.trim().split(/\s+/).join(' ');
}
