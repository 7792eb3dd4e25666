import type { ILayoutRestorer } from '@jupyterlab/application';
import { MainAreaWidget } from '@jupyterlab/apputils';
import type { ServerConnection } from '@jupyterlab/services';
import { Panel } from '@lumino/widgets';
import { nbdistIcon } from '../icon';
import type { ICellsContext } from '../runs/cells';
import { Commands, labelled } from './commands';
import { OpenTabs } from './opentabs';

const SUBJECT = 'runs';

/** Tab of all stored runs. Its code is loaded when it is first opened. */
class RunsTab extends MainAreaWidget<Panel> {
  constructor(
    readonly subject: string,
    settings: ServerConnection.ISettings,
    context: ICellsContext
  ) {
    const content = new Panel();
    const load = async (): Promise<void> => {
      const { RunsView } = await import('../runs/view');
      content.addWidget(new RunsView(settings, context));
    };
    super({ content, reveal: load() });
    this.toolbar.hide(); // the toolbar is empty
    content.addClass('nbdist-RunsPanel');
    content.node.setAttribute('role', 'region');
    content.node.setAttribute('aria-label', context.trans.__('Stored runs'));
    this.id = 'nbdist-all-runs';
    this.title.label = context.trans.__('Runs');
    this.title.closable = true;
    this.title.icon = nbdistIcon;
  }
}

/** Add the command that opens the tab of all runs. A page reload restores the tab. */
export function addRunsTab(context: ICellsContext, restorer: ILayoutRestorer | null): void {
  const { app, area, trans } = context;
  const { serverSettings } = app.serviceManager;
  const create = (subject: string): RunsTab => new RunsTab(subject, serverSettings, context);
  const tabs = new OpenTabs(app, area, 'nbdist-all-runs', Commands.openRuns, create);
  app.commands.addCommand(Commands.openRuns, {
    label: labelled(trans.__('Open runs')),
    describedBy: { args: { type: 'object', properties: {} } },
    execute: () => tabs.open(SUBJECT)
  });
  if (restorer !== null) {
    tabs.restore(restorer);
  }
}
