import type { ILayoutRestorer, JupyterFrontEnd } from '@jupyterlab/application';
import { MainAreaWidget } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';
import { nbdistIcon } from '../icon';
import type { LiveRuns } from '../live';
import { Commands, labelled } from '../panel/commands';
import type { ServerModel } from '../panel/model';
import { OpenTabs } from '../panel/opentabs';
import { runTitle } from '../panel/words';
import { translateWith } from '../translate';
import { ClusterSubject, RunSubject } from './subjects';
import type { ISubject } from './subjects';
import { WorkerPage } from './page';

/** Open the page of a worker of a run, or of a cluster. */
export function openWorker(commands: CommandRegistry, owner: string, rank: number): void {
  void commands.execute(Commands.openWorker, { id: `${owner}/${rank}` });
}

/** Tabs of workers, and the command that opens one. */
export class WorkerTabs {
  constructor(
    private readonly app: JupyterFrontEnd,
    runs: LiveRuns,
    server: ServerModel,
    private readonly trans: TranslationBundle,
    area: 'main' | 'right'
  ) {
    const create = (subject: string): WorkerTab =>
      new WorkerTab(subject, runs, server, app.commands, trans);
    this.tabs = new OpenTabs(app, area, 'nbdist-workers', Commands.openWorker, create);
  }

  addCommand(): void {
    const description = 'Id of a run or a cluster, and rank, as in ID/2';
    const id = { type: 'string', description };
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

/** Tab of the main area that shows one worker. Its subject is `run id/rank`, or `cluster id/rank`. */
class WorkerTab extends MainAreaWidget<WorkerContent> {
  constructor(
    readonly subject: string,
    runs: LiveRuns,
    server: ServerModel,
    commands: CommandRegistry,
    trans: TranslationBundle
  ) {
    const [owner = '', rank = ''] = subject.split('/', 2);
    const shown = isRun(owner)
      ? new RunSubject(owner, Number(rank), runs)
      : new ClusterSubject(owner, Number(rank), runs, server);
    super({ content: new WorkerContent(shown, Number(rank), commands, trans) });
    this.id = `nbdist-worker-${owner}-${rank}`;
    this.title.closable = true;
    this.title.icon = nbdistIcon;
  }
}

/** Return true for the id of a run, which begins with its time. Ids of clusters do not. */
function isRun(owner: string): boolean {
  return /^\d{8}-\d{6}-/.test(owner);
}

class WorkerContent extends Widget {
  constructor(
    private readonly subject: ISubject,
    rank: number,
    commands: CommandRegistry,
    trans: TranslationBundle
  ) {
    super();
    this.addClass('nbdist-RunTab');
    this.title.label = trans.__('Worker %1', rank);
    const openRun = (): void => void commands.execute(Commands.openRun, { id: subject.run });
    const head = (): ReturnType<ISubject['head']> => subject.head();
    const { node } = this;
    this.page = new WorkerPage(node, rank, subject.log, head, openRun, translateWith(trans));
    subject.start(this.page, run => {
      this.title.label = trans.__('Worker %1 · %2', rank, runTitle(run, trans));
      this.title.caption = run.header;
    });
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this.page.dispose();
      this.subject.dispose();
      super.dispose();
    }
  }

  private readonly page: WorkerPage;
}
