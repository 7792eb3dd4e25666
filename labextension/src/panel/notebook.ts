import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { NotebookActions } from '@jupyterlab/notebook';
import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import { showErrorIn } from '../revive/outputs';

/** The current notebook and its kernel. */
export class CurrentNotebook implements IDisposable {
  constructor(
    private readonly tracker: INotebookTracker,
    private readonly app: JupyterFrontEnd
  ) {
    tracker.currentChanged.connect(this.follow, this);
    this.follow();
  }

  isDisposed = false;

  /** Emitted when the current notebook or its kernel changes. */
  get changed(): ISignal<this, void> {
    return this.signal;
  }

  get isThere(): boolean {
    return this.tracker.currentWidget !== null;
  }

  /** Id of the kernel. Empty if there is none. */
  get kernel(): string {
    return kernelOf(this.tracker.currentWidget);
  }

  /** Title of the current notebook with a kernel. Empty without such a notebook. */
  get title(): string {
    return this.titleOf(this.kernel);
  }

  /** Return the title of the open notebook with this kernel. Empty if there is none. */
  titleOf(kernel: string): string {
    return this.withKernel(kernel)?.title.label ?? '';
  }

  /** Return true if an open notebook contains this cell. */
  contains(cell: string): boolean {
    return this.withCell(cell) !== undefined;
  }

  /** Show this cell, and the error in its output. Returns false if no open notebook contains it. */
  show(cell: string): boolean {
    const panel = this.withCell(cell);
    if (panel === undefined) {
      return false;
    }
    this.app.shell.activateById(panel.id);
    const index = indexOf(panel, cell);
    panel.content.activeCellIndex = index;
    const shown = panel.content.widgets[index]!;
    void panel.content.scrollToCell(shown).then(() => showErrorIn(shown.node));
    return true;
  }

  /** Open a new notebook. Returns the id of its kernel once it runs, empty if no kernel starts. */
  async create(): Promise<string> {
    const { commands, serviceManager } = this.app;
    const kernelName = serviceManager.kernelspecs.specs?.default ?? '';
    const created: unknown = await commands.execute('notebook:create-new', { kernelName });
    const panel = this.tracker.find(one => one === created);
    await panel?.sessionContext.ready;
    return kernelOf(panel ?? null);
  }

  /** Insert a cell below the active one. */
  insert(code: string): void {
    const panel = this.tracker.currentWidget;
    if (panel !== null) {
      insertInto(panel, code);
    }
  }

  /**
   * Insert a cell below the active one, as `insert` does, in the notebook with this kernel, and run it.
   *
   * Returns false if the cell fails, or no open notebook has this kernel.
   */
  async run(code: string, kernel: string): Promise<boolean> {
    const panel = this.withKernel(kernel);
    if (panel === undefined) {
      return false;
    }
    insertInto(panel, code);
    return NotebookActions.run(panel.content, panel.sessionContext);
  }

  dispose(): void {
    this.isDisposed = true;
    Signal.clearData(this);
  }

  private withKernel(kernel: string): NotebookPanel | undefined {
    return this.tracker.find(panel => kernel !== '' && kernelOf(panel) === kernel);
  }

  private withCell(cell: string): NotebookPanel | undefined {
    return this.tracker.find(panel => cell !== '' && indexOf(panel, cell) >= 0);
  }

  private follow(): void {
    this.followed?.sessionContext.kernelChanged.disconnect(this.notify, this);
    this.followed = this.tracker.currentWidget;
    this.followed?.sessionContext.kernelChanged.connect(this.notify, this);
    this.notify();
  }

  private notify(): void {
    this.signal.emit();
  }

  private followed: NotebookPanel | null = null;
  private readonly signal = new Signal<this, void>(this);
}

function kernelOf(panel: NotebookPanel | null): string {
  return panel?.sessionContext.session?.kernel?.id ?? '';
}

function indexOf(panel: NotebookPanel, cell: string): number {
  return panel.content.widgets.findIndex(({ model }) => model.id === cell);
}

/** Insert code below the active cell, or into it if it is empty. */
function insertInto(panel: NotebookPanel, code: string): void {
  const { activeCell } = panel.content;
  if (activeCell?.model.type !== 'code' || activeCell.model.sharedModel.source !== '') {
    NotebookActions.insertBelow(panel.content);
  }
  panel.content.activeCell?.model.sharedModel.setSource(code);
}
