import type { ICodeCellModel } from '@jupyterlab/cells';
import type {
  IDisplayData,
  IMimeBundle,
  IOutput,
  IStream,
  OutputMetadata
} from '@jupyterlab/nbformat';
import type { IOutputModel } from '@jupyterlab/rendermime';
import type { KernelMessage } from '@jupyterlab/services';
import type { IRunOutput } from '../records';
import { RUN_MIME } from '../records';

type DisplayMessage = KernelMessage.IDisplayDataMsg | KernelMessage.IUpdateDisplayDataMsg;

/**
 * Outputs of a cell whose page is gone: the run, its text, and other outputs of the kernel.
 *
 * Keeps the saved outputs of the run except text, because the server sends all text again.
 */
export class RevivedOutputs {
  constructor(
    private readonly model: ICodeCellModel,
    private readonly run: string
  ) {
    const { outputs } = model;
    this.hasChart = this.chartAt() >= 0;
    // Without a chart, the outputs are only text or belong to an earlier execution.
    outputs.fromJSON(this.hasChart ? outputs.toJSON().filter(output => !isStream(output)) : []);
  }

  /** Add the run, unless it is shown or the user removed it. */
  addChart(text: string): void {
    if (!this.hasChart) {
      this.hasChart = true;
      const output: IRunOutput = { id: this.run, text, over: false };
      this.add(displayed({ [RUN_MIME]: { ...output }, 'text/plain': text }, {}));
    }
  }

  addText(text: string): void {
    const output: IStream = { output_type: 'stream', name: 'stdout', text };
    this.add(output);
  }

  add(output: IOutput): number {
    return this.model.outputs.add(output);
  }

  /** Apply a display message: an update of the run, or an output of a rank. */
  display(message: DisplayMessage): void {
    const { data, metadata, transient } = message.content;
    const run = data[RUN_MIME] as Partial<IRunOutput> | undefined;
    const id = transient?.display_id;
    const output = displayed(data, metadata);
    const shown = id === undefined ? undefined : this.displays.get(id);
    if (run?.id === this.run) {
      this.addChart(run.text ?? '');
      this.set(this.chartAt(), output);
    } else if (shown !== undefined && message.header.msg_type === 'update_display_data') {
      this.set(this.indexOf(shown), output, id);
    } else {
      this.remember(id, this.add(output) - 1);
    }
  }

  private set(index: number, output: IDisplayData, id?: string): void {
    if (index >= 0) {
      this.model.outputs.set(index, output);
      this.remember(id, index);
    }
  }

  private remember(id: string | undefined, index: number): void {
    if (id !== undefined) {
      this.displays.set(id, this.model.outputs.get(index));
    }
  }

  private chartAt(): number {
    const isChart = ({ type, data }: IOutputModel): boolean =>
      type !== 'stream' && (data[RUN_MIME] as Partial<IRunOutput>)?.id === this.run;
    return this.find(isChart);
  }

  private indexOf(wanted: IOutputModel): number {
    return this.find(output => output === wanted);
  }

  private find(is: (output: IOutputModel) => boolean): number {
    const { outputs } = this.model;
    for (let index = 0; index < outputs.length; index++) {
      if (is(outputs.get(index))) {
        return index;
      }
    }
    return -1;
  }

  private hasChart: boolean;
  private readonly displays = new Map<string, IOutputModel>();
}

function isStream(output: IOutput): boolean {
  return output.output_type === 'stream';
}

function displayed(data: IMimeBundle, metadata: OutputMetadata): IDisplayData {
  return { output_type: 'display_data', data, metadata };
}

/** Selector of errors. JupyterLab renders them as it renders text on stderr, which comes before. */
const ERRORS = '[data-mime-type="application/vnd.jupyter.stderr"]';

/** Scroll to the last error of an output area. Returns false if it contains none. */
export function showErrorIn(area: Element | null): boolean {
  const errors = area?.querySelectorAll<HTMLElement>(ERRORS) ?? [];
  const error = errors[errors.length - 1];
  if (error === undefined) {
    return false;
  }
  error.tabIndex = -1;
  error.focus({ preventScroll: true });
  error.scrollIntoView({ block: 'nearest' });
  return true;
}
