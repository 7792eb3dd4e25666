import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { NotebookActions } from '@jupyterlab/notebook';
import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';

/** The notebook that the user is in, and its kernel. */
export class CurrentNotebook implements IDisposable {
  constructor(private readonly tracker: INotebookTracker) {
    tracker.currentChanged.connect(this.follow, this);
    this.follow();
  }

  isDisposed = false;

  /** Emitted when it is another notebook, or has another kernel. */
  get changed(): ISignal<this, void> {
    return this.signal;
  }

  get isThere(): boolean {
    return this.tracker.currentWidget !== null;
  }

  /** The kernel's id; '' where there is none. */
  get kernel(): string {
    return kernelOf(this.tracker.currentWidget);
  }

  /** The title of the open notebook that has this kernel; '' where none has. */
  titleOf(kernel: string): string {
    return this.withKernel(kernel)?.title.label ?? '';
  }

  /** Put a cell below the active one. */
  insert(code: string): void {
    const panel = this.tracker.currentWidget;
    if (panel !== null) {
      insertInto(panel, code);
    }
  }

  /** Put a cell below the active one of the notebook that has this kernel, and run it. */
  async run(code: string, kernel: string): Promise<void> {
    const panel = this.withKernel(kernel);
    if (panel !== undefined) {
      insertInto(panel, code);
      await NotebookActions.run(panel.content, panel.sessionContext);
    }
  }

  dispose(): void {
    this.isDisposed = true;
    Signal.clearData(this);
  }

  private withKernel(kernel: string): NotebookPanel | undefined {
    return this.tracker.find(panel => kernel !== '' && kernelOf(panel) === kernel);
  }

  private follow(): void {
    this.followed?.sessionContext.kernelChanged.disconnect(this.tell, this);
    this.followed = this.tracker.currentWidget;
    this.followed?.sessionContext.kernelChanged.connect(this.tell, this);
    this.tell();
  }

  private tell(): void {
    this.signal.emit();
  }

  private followed: NotebookPanel | null = null;
  private readonly signal = new Signal<this, void>(this);
}

function kernelOf(panel: NotebookPanel | null): string {
  return panel?.sessionContext.session?.kernel?.id ?? '';
}

function insertInto(panel: NotebookPanel, code: string): void {
  NotebookActions.insertBelow(panel.content);
  panel.content.activeCell?.model.sharedModel.setSource(code);
}
