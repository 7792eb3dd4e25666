import type { ILayoutRestorer, JupyterFrontEnd } from '@jupyterlab/application';
import { WidgetTracker } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { nbdistIcon } from '../icon';
import type { LiveRuns } from '../live';
import { Commands } from './commands';
import type { ServerModel } from './model';
import { RunTab } from './tab';

/** The open tabs of runs: one for each run, and back after a reload of the page. */
export class RunTabs {
  /**
   * @param area where the shell has room for them: Notebook 7 has none beside the notebook.
   */
  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly runs: LiveRuns,
    private readonly trans: TranslationBundle,
    private readonly area: 'main' | 'right'
  ) {}

  addCommands(server: ServerModel): void {
    const { commands } = this.app;
    const id = { id: { type: 'string', description: 'Which run' } };
    commands.addCommand(Commands.openRun, {
      label: this.trans.__('Open a run'),
      describedBy: { args: { type: 'object', properties: id, required: ['id'] } },
      execute: args => this.open(String(args['id']))
    });
    commands.addCommand(Commands.openLatestRun, {
      label: this.trans.__('Open the latest run'),
      describedBy: { args: { type: 'object', properties: {} } },
      isEnabled: () => server.runs.length > 0,
      execute: () => server.runs.slice(0, 1).forEach(run => this.open(run.id))
    });
    server.changed.connect(() => commands.notifyCommandChanged(Commands.openLatestRun));
  }

  restore(restorer: ILayoutRestorer): void {
    void restorer.restore(this.tracker, {
      command: Commands.openRun,
      args: tab => ({ id: tab.run }),
      name: tab => tab.run
    });
  }

  private open(id: string): void {
    const tab = this.tracker.find(one => one.run === id) ?? this.create(id);
    this.app.shell.activateById(tab.id);
  }

  private create(id: string): RunTab {
    const tab = new RunTab(id, this.runs, this.trans, nbdistIcon);
    this.app.shell.add(tab, this.area);
    void this.tracker.add(tab);
    return tab;
  }

  private readonly tracker = new WidgetTracker<RunTab>({ namespace: 'nbdist-runs' });
}
