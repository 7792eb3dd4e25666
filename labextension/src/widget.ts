import type { AnyModel, AnyWidget } from '@anywidget/types';
import plotStyle from 'uplot/dist/uPlot.min.css';
import runStyle from '../style/run.css';
import type { IRunState, ITable } from './records';
import { make } from './run/dom';
import { RunModel } from './run/model';
import { isOpen } from './run/status';
import { RunView } from './run/view';

/** Traits of the Python widget. */
interface ITraits {
  /** Null until the run starts. */
  state: IRunState | null;
  tables: readonly ITable[];
}

/** Message with buffers of rows: float64, little-endian, `[table number, row, row, ...]`. */
interface IRowsMessage {
  readonly type: 'Rows';
  /** The buffers hold all rows of the run: discard earlier rows. */
  readonly from_start: boolean;
}

/**
 * ipykernel 7.4 receives no messages of the page while a cell runs:
 * github.com/ipython/ipykernel/issues/1564
 */
const HOW_TO_STOP = 'To stop the run, interrupt the kernel.';

/** Widget for front ends without the extension: the same view, fed by messages of the kernel. */
function widget(): AnyWidget<ITraits> {
  // anywidget passes another proxy of its model to each call, so the shared model is kept here.
  const run = new RunModel();
  return {
    initialize({ model, signal }) {
      const stopFeeding = feed(run, model);
      signal.addEventListener('abort', stopFeeding);
    },
    render({ el, signal }) {
      const host = make('div', '');
      const words = make('p', 'empty', {}, HOW_TO_STOP);
      el.append(styles(), host, words);
      const view = new RunView(host, run, { stop: () => Promise.resolve(true) });
      const look = (): void => {
        const { state } = run;
        words.hidden = state === null || !isOpen(state.status) || state.program !== '';
      };
      const stopLooking = run.subscribe(look);
      look();
      signal.addEventListener('abort', () => {
        stopLooking();
        view.dispose();
      });
    }
  };
}

/** Forward the data of the kernel to the model. Returns a function that stops it. */
function feed(run: RunModel, model: AnyModel<ITraits>): () => void {
  let known = 0;
  const takeState = (): void => {
    const state = model.get('state');
    if (state !== null) {
      run.onState(state);
    }
  };
  const takeTables = (): void => {
    const tables = model.get('tables');
    tables.slice(known).forEach(table => run.onTable(table));
    known = tables.length;
  };
  const takeRows = (message: IRowsMessage, buffers: readonly DataView[]): void => {
    if (message.from_start) {
      run.reset();
      known = 0;
      takeTables();
    }
    buffers.forEach(buffer => run.onRows(rowsOf(buffer)));
    run.onCaughtUp();
  };
  model.on('change:state', takeState);
  model.on('change:tables', takeTables);
  model.on('msg:custom', takeRows);
  takeState();
  takeTables();
  run.onConnection('saved'); // hides the stop button: it has no effect here
  return () => {
    model.off('change:state', takeState);
    model.off('change:tables', takeTables);
    model.off('msg:custom', takeRows);
  };
}

/** Return the rows of a buffer. Its offset may not be a multiple of eight bytes. */
function rowsOf(buffer: DataView): Float64Array {
  const { byteOffset, byteLength } = buffer;
  return new Float64Array(buffer.buffer.slice(byteOffset, byteOffset + byteLength) as ArrayBuffer);
}

function styles(): HTMLStyleElement {
  const style = document.createElement('style');
  style.textContent = plotStyle + runStyle;
  return style;
}

export default widget;
