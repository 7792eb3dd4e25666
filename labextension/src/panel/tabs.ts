import type { ILayoutRestorer, JupyterFrontEnd } from '@jupyterlab/application';
import type { TranslationBundle } from '@jupyterlab/translation';
import { nbdistIcon } from '../icon';
import type { LiveRuns } from '../live';
import { Commands, labelled } from './commands';
import type { ServerModel } from './model';
import type { CurrentNotebook } from './notebook';
import { OpenTabs } from './opentabs';
import { RunTab } from './tab';
import { WorkerTabs } from '../worker/tabs';

/** Tabs of runs and of their workers, and the commands that open them. */
export class RunTabs {
  constructor(
    private readonly app: JupyterFrontEnd,
    runs: LiveRuns,
    private readonly server: ServerModel,
    notebooks: CurrentNotebook,
    private readonly trans: TranslationBundle,
    area: 'main' | 'right'
  ) {
    const create = (run: string): RunTab =>
      new RunTab(run, runs, notebooks, app.commands, trans, nbdistIcon);
    this.tabs = new OpenTabs(app, area, 'nbdist-runs', Commands.openRun, create);
    this.workers = new WorkerTabs(app, runs, server, trans, area);
  }

  addCommands(): void {
    const { server } = this;
    const { commands } = this.app;
    this.workers.addCommand();
    const id = { id: { type: 'string', description: 'Run id' } };
    commands.addCommand(Commands.openRun, {
      label: labelled(this.trans.__('Open run')),
      describedBy: { args: { type: 'object', properties: id, required: ['id'] } },
      execute: args => this.tabs.open(String(args['id']))
    });
    commands.addCommand(Commands.openLatestRun, {
      label: labelled(this.trans.__('Open latest run')),
      describedBy: { args: { type: 'object', properties: {} } },
      isEnabled: () => server.runs.length > 0,
      execute: () => server.runs.slice(0, 1).forEach(run => this.tabs.open(run.id))
    });
    server.changed.connect(() => commands.notifyCommandChanged(Commands.openLatestRun));
  }

  restore(restorer: ILayoutRestorer): void {
    this.tabs.restore(restorer);
    this.workers.restore(restorer);
  }

  private readonly tabs: OpenTabs<RunTab>;
  private readonly workers: WorkerTabs;
}
