import type { ISessionContext } from '@jupyterlab/apputils';
import type { CodeCell } from '@jupyterlab/cells';
import type { IError } from '@jupyterlab/nbformat';
import type { NotebookPanel } from '@jupyterlab/notebook';
import type { ServerConnection } from '@jupyterlab/services';
import { KernelMessage } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import type { IRunState } from '../records';
import { RevivedOutputs } from './outputs';
import { RunText } from './text';

/** Fill the outputs of a running cell that another page started, until its run ends. */
export class RevivedCell implements IDisposable {
  constructor(
    private readonly panel: NotebookPanel,
    private readonly cell: CodeCell,
    private state: IRunState,
    settings: ServerConnection.ISettings
  ) {
    this.outputs = new RevivedOutputs(cell.model, state.id);
    cell.model.executionState = 'running';
    cell.setPrompt('*'); // JupyterLab 4.2 has no executionState
    this.onState(state);
    panel.sessionContext.iopubMessage.connect(this.onMessage, this);
    panel.sessionContext.statusChanged.connect(this.endWhenAllIsIn, this);
    this.text = new RunText(state.id, settings, {
      onState: next => this.onState(next),
      onReports: () => this.write(() => this.outputs.addChart(this.state.status)),
      onText: text => this.write(() => this.outputs.addText(text)),
      onEnd: () => {
        this.hasText = true;
        this.endWhenAllIsIn();
      }
    });
  }

  isDisposed = false;

  dispose(): void {
    this.isDisposed = true;
    this.text.dispose();
    this.panel.sessionContext.iopubMessage.disconnect(this.onMessage, this);
    this.panel.sessionContext.statusChanged.disconnect(this.endWhenAllIsIn, this);
  }

  /**
   * Handle a kernel message. This page has no future for it: the page that sent the request is
   * gone.
   */
  onKernelMessage(message: KernelMessage.IMessage): void {
    if (this.isDisposed || !isAnswer(message, this.state)) {
      return;
    }
    if (KernelMessage.isDisplayDataMsg(message) || KernelMessage.isUpdateDisplayDataMsg(message)) {
      this.write(() => this.outputs.display(message));
    } else if (KernelMessage.isErrorMsg(message)) {
      this.error = { output_type: 'error', ...message.content };
    } else if (KernelMessage.isStatusMsg(message) && message.content.execution_state === 'idle') {
      this.hasAnswered = true;
      this.write(() => this.setCount());
      this.endWhenAllIsIn();
    }
  }

  private onState(state: IRunState): void {
    this.state = state;
    if (reports(state)) {
      this.write(() => this.outputs.addChart(state.status));
    }
  }

  /** Finish when both text and picture have arrived. The picture may arrive after the text. */
  private endWhenAllIsIn(): void {
    const kernel = this.panel.sessionContext.session?.kernel;
    const mayAnswer = kernel?.status === 'busy' || kernel?.status === 'unknown';
    if (this.hasText && (this.hasAnswered || !mayAnswer)) {
      const { error } = this; // errors follow all text
      this.write(() => error === null || this.outputs.add(error));
      this.write(() => this.setCount());
      this.dispose();
    }
  }

  private onMessage(_: ISessionContext, message: KernelMessage.IMessage): void {
    this.onKernelMessage(message);
  }

  private setCount(): void {
    this.cell.model.executionCount = this.state.label;
  }

  /** Change the cell, unless it was deleted or runs again. */
  private write(change: () => unknown): void {
    if (this.cell.isDisposed || this.cell.outputArea.future) {
      this.dispose();
    } else {
      change();
    }
  }

  private error: IError | null = null;
  private hasText = false;
  private hasAnswered = false;
  private readonly outputs: RevivedOutputs;
  private readonly text: RunText;
}

/** Return true if the message belongs to the execution of the run. */
export function isAnswer(message: KernelMessage.IMessage, { request }: IRunState): boolean {
  const { msg_id } = message.parent_header as Partial<KernelMessage.IHeader>;
  return msg_id === request;
}

/** Return true if the run will report metrics. Many cells only print. */
function reports(state: IRunState): boolean {
  return state.replicas > 0 || state.epochs > 0 || state.steps >= 0;
}
