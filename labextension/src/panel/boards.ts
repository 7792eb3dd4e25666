import type { ILayoutRestorer, JupyterFrontEnd } from '@jupyterlab/application';
import { IFrame, MainAreaWidget } from '@jupyterlab/apputils';
import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Panel, Widget } from '@lumino/widgets';
import { nbdistIcon } from '../icon';
import { make } from '../run/dom';
import { request } from '../server';
import { Commands, labelled } from './commands';
import { OpenTabs } from './opentabs';

/** Path of TensorBoard behind the Jupyter server. Python has it in `pyproject.toml`. */
const PATH = 'nbdist-tensorboard';
/** Subject of the tab with all runs. */
const ALL = 'all';

const READ_POLL_MS = 500;
/** Maximum wait for the data of a run. A run without reports has none. */
const READ_LIMIT_MS = 15_000;

interface IContext {
  readonly app: JupyterFrontEnd;
  readonly area: 'main' | 'right';
  readonly trans: TranslationBundle;
}

/** Add the command that opens TensorBoard in a tab. A page reload restores the tabs. */
export function addBoards(context: IContext, restorer: ILayoutRestorer | null): void {
  const { app, area, trans } = context;
  const { serverSettings } = app.serviceManager;
  const create = (subject: string): Board => new Board(subject, serverSettings, trans);
  const tabs = new OpenTabs(app, area, 'nbdist-boards', Commands.openBoard, create);
  const id = { type: 'string', description: 'Run id; all runs without it' };
  app.commands.addCommand(Commands.openBoard, {
    label: labelled(trans.__('Open TensorBoard')),
    describedBy: { args: { type: 'object', properties: { id } } },
    execute: args => tabs.open(String(args['id'] ?? ALL))
  });
  if (restorer !== null) {
    tabs.restore(restorer);
  }
}

/** Tab with TensorBoard on one run, or on all stored runs. */
class Board extends MainAreaWidget<Panel> {
  constructor(
    readonly subject: string,
    settings: ServerConnection.ISettings,
    trans: TranslationBundle
  ) {
    const content = new Panel();
    super({ content, reveal: load(content, subject, settings, trans) });
    this.toolbar.hide(); // the toolbar is empty
    content.addClass('nbdist-Board');
    this.id = `nbdist-board-${subject}`;
    this.title.label = trans.__('TensorBoard');
    this.title.caption = subject === ALL ? trans.__('All stored runs') : subject;
    this.title.closable = true;
    this.title.icon = nbdistIcon;
  }
}

/** Show TensorBoard once it answers: the first request starts it. */
async function load(
  content: Panel,
  subject: string,
  settings: ServerConnection.ISettings,
  trans: TranslationBundle
): Promise<void> {
  try {
    await request(settings, `${PATH}/`);
    await untilRead(subject, settings);
  } catch (error) {
    content.addWidget(new Widget({ node: problem(error, trans) }));
    return;
  }
  const frame = new IFrame({
    sandbox: [
      'allow-same-origin',
      'allow-scripts',
      'allow-forms',
      'allow-popups',
      'allow-downloads'
    ]
  });
  frame.url = `${URLExt.join(settings.baseUrl, PATH)}/${query(subject)}#timeseries`;
  frame.node.querySelector('iframe')?.setAttribute('title', trans.__('TensorBoard'));
  content.addWidget(frame);
}

/** Wait until TensorBoard has read the run: its page does not reload data by itself. */
async function untilRead(subject: string, settings: ServerConnection.ISettings): Promise<void> {
  const deadline = Date.now() + READ_LIMIT_MS;
  while (Date.now() < deadline) {
    const response = await request(settings, `${PATH}/data/plugin/scalars/tags`);
    const names = Object.keys((await response.json()) as object);
    if (names.some(name => subject === ALL || name.startsWith(`${subject}/`))) {
      return;
    }
    await new Promise(resolve => setTimeout(resolve, READ_POLL_MS));
  }
}

/** Return the query that selects one run and the colours of the page. */
function query(subject: string): string {
  const values = new URLSearchParams();
  if (subject !== ALL) {
    values.set('runFilter', `^${subject}/`);
  }
  if (document.body.dataset['jpThemeLight'] === 'false') {
    values.set('darkMode', 'true');
  }
  return `?${values.toString()}`;
}

function problem(error: unknown, trans: TranslationBundle): HTMLElement {
  const isMissing = error instanceof ServerConnection.ResponseError;
  const text = isMissing
    ? trans.__(
        'The Jupyter server cannot start TensorBoard. Run `pip install "nbdist[tensorboard]"` in its environment, and restart it.'
      )
    : trans.__('The Jupyter server does not respond.');
  return make('p', 'Error', { role: 'alert' }, text);
}
