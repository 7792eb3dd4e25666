import type { ISessionContext } from '@jupyterlab/apputils';
import { CodeCell } from '@jupyterlab/cells';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { KernelMessage, ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import type { ServerModel } from '../panel/model';
import type { IRunState } from '../records';
import { RevivedCell, isAnswer } from './cell';

/** First minor version of the notebook format with stable cell ids. */
const MINOR_WITH_IDS = 5;

/**
 * Show runs of the notebook's kernel that another page started.
 *
 * Applies to a page that was opened during a run, and to later runs that the closed page had
 * queued. Other open pages do not show executions of a notebook, as usual in JupyterLab.
 */
export class RevivedNotebook implements IDisposable {
  constructor(
    private readonly panel: NotebookPanel,
    private readonly tracker: INotebookTracker,
    private readonly server: ServerModel,
    private readonly settings: ServerConnection.ISettings
  ) {
    panel.sessionContext.kernelChanged.connect(this.begin, this);
    panel.sessionContext.iopubMessage.connect(this.onKernelMessage, this);
    server.changed.connect(this.update, this);
    void panel.context.ready.then(() => this.begin());
  }

  isDisposed = false;

  dispose(): void {
    this.isDisposed = true;
    this.leave();
    this.panel.sessionContext.kernelChanged.disconnect(this.begin, this);
    this.panel.sessionContext.iopubMessage.disconnect(this.onKernelMessage, this);
    this.server.changed.disconnect(this.update, this);
  }

  /** Start to follow the kernel of the notebook. */
  private begin(): void {
    this.leave();
    if (this.kernel !== '' && this.panel.context.isReady) {
      this.follows = this.isNew = true;
      this.update();
      void this.server.refresh().finally(() => {
        this.update();
        this.leaveEarly();
        this.follows = this.cells.size > 0 || document.hidden; // a hidden page does not poll
      });
    }
  }

  private update(): void {
    if (this.follows && !this.isDisposed) {
      this.runs().forEach(run => this.revive(run));
    }
  }

  /**
   * Return the run of the kernel, even if it ended, because its picture may still arrive. Also
   * return runs whose messages arrived early.
   */
  private runs(): readonly IRunState[] {
    const id = this.server.clusterOf(this.kernel)?.run ?? '';
    const hasMessage = (run: IRunState): boolean =>
      this.early.some(message => isAnswer(message, run));
    return this.server.runs.filter(run => run.id === id || hasMessage(run));
  }

  private revive(run: IRunState): void {
    const cell = this.cells.has(run.id) ? undefined : this.cellOf(run);
    if (cell !== undefined && !cell.outputArea.future && !this.isOurs(run)) {
      const revived = new RevivedCell(this.panel, cell, run, this.settings);
      this.cells.set(run.id, revived);
      this.early.forEach(message => revived.onKernelMessage(message));
    }
  }

  /**
   * Keep early messages: the response of the server may arrive after the last message of the run.
   */
  private onKernelMessage(_: ISessionContext, message: KernelMessage.IMessage): void {
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

  /** Return true if this page started the run, in this notebook or in another view of it. */
  private isOurs(run: IRunState): boolean {
    const asks = (cell: CodeCell): boolean =>
      cell.outputArea.future?.msg.header.msg_id === run.request;
    return this.tracker.find(panel => codeCells(panel).some(asks)) !== undefined;
  }

  /** Return the running cell. Matched by its first line if the notebook has no cell ids. */
  private cellOf(run: IRunState): CodeCell | undefined {
    const { model } = this.panel;
    if (run.request === '' || model === null || model.collaborative) {
      return undefined; // other clients of a shared notebook write its outputs
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
  /** The page was opened and the server has not responded yet. */
  private isNew = false;
  /** Kernel messages since the page was opened. */
  private readonly early: KernelMessage.IMessage[] = [];
  /** Cells by run id, including ended runs. */
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
