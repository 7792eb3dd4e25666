import type { ILayoutRestorer, JupyterFrontEnd } from '@jupyterlab/application';
import { MainAreaWidget } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';
import { nbdistIcon } from '../icon';
import type { IWatch, LiveRuns } from '../live';
import { Commands, labelled } from '../panel/commands';
import { OpenTabs } from '../panel/opentabs';
import { translateWith } from '../translate';
import { WorkerFeed } from './feed';
import { WorkerPage } from './page';

/** Open the page of a worker. */
export function openWorker(commands: CommandRegistry, run: string, rank: number): void {
  void commands.execute(Commands.openWorker, { id: `${run}/${rank}` });
}

/** Tabs of workers, and the command that opens one. */
export class WorkerTabs {
  constructor(
    private readonly app: JupyterFrontEnd,
    runs: LiveRuns,
    private readonly trans: TranslationBundle,
    area: 'main' | 'right'
  ) {
    const create = (subject: string): WorkerTab =>
      new WorkerTab(subject, runs, app.commands, trans);
    this.tabs = new OpenTabs(app, area, 'nbdist-workers', Commands.openWorker, create);
  }

  addCommand(): void {
    const id = { type: 'string', description: 'Run id and rank, as in ID/2' };
    this.app.commands.addCommand(Commands.openWorker, {
      label: labelled(this.trans.__('Open worker')),
      describedBy: { args: { type: 'object', properties: { id }, required: ['id'] } },
      execute: args => this.tabs.open(String(args['id']))
    });
  }

  restore(restorer: ILayoutRestorer): void {
    this.tabs.restore(restorer);
  }

  private readonly tabs: OpenTabs<WorkerTab>;
}

/** Tab of the main area that shows one worker of a run. Its subject is `run id/rank`. */
class WorkerTab extends MainAreaWidget<WorkerContent> {
  constructor(
    readonly subject: string,
    runs: LiveRuns,
    commands: CommandRegistry,
    trans: TranslationBundle
  ) {
    const [run = '', rank = ''] = subject.split('/', 2);
    super({ content: new WorkerContent(run, Number(rank), runs, commands, trans) });
    this.id = `nbdist-worker-${run}-${rank}`;
    this.title.closable = true;
    this.title.icon = nbdistIcon;
  }
}

class WorkerContent extends Widget {
  constructor(
    run: string,
    rank: number,
    runs: LiveRuns,
    commands: CommandRegistry,
    trans: TranslationBundle
  ) {
    super();
    this.addClass('nbdist-RunTab');
    this.title.label = trans.__('Worker %1', rank);
    this.watch = runs.watch(run);
    this.feed = new WorkerFeed(run, rank, runs.settings);
    const openRun = (): void => void commands.execute(Commands.openRun, { id: run });
    const translate = translateWith(trans);
    this.page = new WorkerPage(this.node, this.watch.model, this.feed, rank, openRun, translate);
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this.page.dispose();
      this.feed.dispose();
      this.watch.dispose();
      super.dispose();
    }
  }

  private readonly watch: IWatch;
  private readonly feed: WorkerFeed;
  private readonly page: WorkerPage;
}
