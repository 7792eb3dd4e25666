import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { Token } from '@lumino/coreutils';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { LiveRuns } from './live';
import { rendererFactory } from './mime';

/** Before text/html (0) and the widgets of ipywidgets (0), which an output may hold as well. */
const MIME_RANK = -20;

const ILiveRuns = new Token<LiveRuns>('nbdist:ILiveRuns', 'The runs that the page watches.');

const live: JupyterFrontEndPlugin<LiveRuns> = {
  id: 'nbdist:live',
  description: 'Connections to runs, shared by all that show them.',
  autoStart: true,
  provides: ILiveRuns,
  activate: (app: JupyterFrontEnd) => new LiveRuns(app.serviceManager.serverSettings)
};

const mime: JupyterFrontEndPlugin<void> = {
  id: 'nbdist:mime',
  description: 'Shows runs in the outputs of cells.',
  autoStart: true,
  requires: [ILiveRuns, IRenderMimeRegistry],
  optional: [ITranslator],
  activate: (
    _: JupyterFrontEnd,
    runs: LiveRuns,
    registry: IRenderMimeRegistry,
    translator: ITranslator | null
  ) => {
    const trans = (translator ?? nullTranslator).load('nbdist');
    registry.addFactory(rendererFactory(runs, trans), MIME_RANK);
  }
};

export default [live, mime];
