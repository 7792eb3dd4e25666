import type { JupyterFrontEnd } from '@jupyterlab/application';
import { MainAreaWidget, showErrorMessage } from '@jupyterlab/apputils';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { MimeModel } from '@jupyterlab/rendermime';
import type { TranslationBundle } from '@jupyterlab/translation';
import { nbdistIcon } from '../icon';
import type { IRunRow } from '../records';
import { nameOf } from './columns';

const MARKDOWN = 'text/markdown';

/** Objects of JupyterLab that show the cells of a run. */
export interface ICellsContext {
  readonly app: JupyterFrontEnd;
  readonly area: 'main' | 'right';
  readonly registry: IRenderMimeRegistry;
  readonly tracker: INotebookTracker;
  readonly trans: TranslationBundle;
}

/** Open a tab with the cell of the run, then the earlier cells of its cluster. */
export async function showCells(
  row: IRunRow,
  cells: string,
  context: ICellsContext
): Promise<void> {
  const { app, area, registry, trans } = context;
  const id = `nbdist-cells-${row.state.id}`;
  if (![...app.shell.widgets(area)].some(widget => widget.id === id)) {
    const content = registry.createRenderer(MARKDOWN);
    const tab = new MainAreaWidget({ content });
    content.addClass('nbdist-CellsTab');
    tab.id = id;
    tab.title.closable = true;
    tab.title.icon = nbdistIcon;
    tab.title.label = trans.__('Cells of %1', nameOf(row, trans));
    tab.toolbar.hide(); // the toolbar is empty
    const data = { [MARKDOWN]: markdown(cells, trans) };
    await content.renderModel(new MimeModel({ data, trusted: false }));
    app.shell.add(tab, area);
  }
  app.shell.activateById(id);
}

/** Open the notebook of the run and select the cell. */
export async function showInNotebook(row: IRunRow, context: ICellsContext): Promise<void> {
  const { app, tracker, trans } = context;
  const { cell } = row.state;
  const panel = tracker.find(one => placeOf(one, cell) >= 0) ?? (await open(app, row.notebook));
  await panel.context.ready;
  const place = placeOf(panel, cell);
  app.shell.activateById(panel.id);
  if (place < 0) {
    await showErrorMessage(
      trans.__('The cell is gone'),
      trans.__('The notebook no longer contains the cell of this run. Show its stored cells.')
    );
    return;
  }
  panel.content.activeCellIndex = place;
  panel.content.deselectAll();
  await panel.content.scrollToItem(place);
}

async function open(app: JupyterFrontEnd, path: string): Promise<NotebookPanel> {
  return (await app.commands.execute('docmanager:open', { path })) as NotebookPanel;
}

function placeOf(panel: NotebookPanel, cell: string): number {
  return panel.content.widgets.findIndex(({ model }) => model.id === cell);
}

/** Return cells in percent format as Markdown, the last one first. */
export function markdown(cells: string, trans: TranslationBundle): string {
  const parts = cells.split(/^(?=# %% \[\d+\] )/m).filter(part => part.trim() !== '');
  const last = parts.pop() ?? '';
  const earlier = parts.map(part => fenced(part));
  const heading = earlier.length > 0 ? [`## ${trans.__('Earlier cells of the cluster')}`] : [];
  return [`## ${trans.__('Cell of the run')}`, fenced(last), ...heading, ...earlier].join('\n\n');
}

/** Return code in a fence that is longer than those in the code. */
function fenced(part: string): string {
  const code = part.replace(/^# %% \[(\d+)\] /, '# [$1] ').trimEnd();
  const longest = Math.max(2, ...[...code.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = '`'.repeat(longest + 1);
  return `${fence}python\n${code}\n${fence}`;
}
