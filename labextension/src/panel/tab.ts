import { CommandToolbarButton, MainAreaWidget, Toolbar } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { LabIcon } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';
import type { LiveRuns, IWatch } from '../live';
import { RunView } from '../run/view';
import { translateWith } from '../translate';
import { Commands } from './commands';
import { openWorker } from '../worker/tabs';
import type { CurrentNotebook } from './notebook';
import { runTitle } from './words';

/** Tab of the main area that shows one run. */
export class RunTab extends MainAreaWidget<RunContent> {
  constructor(
    readonly subject: string,
    runs: LiveRuns,
    notebooks: CurrentNotebook,
    commands: CommandRegistry,
    trans: TranslationBundle,
    icon: LabIcon
  ) {
    const open = (rank: number): void => openWorker(commands, subject, rank);
    super({ content: new RunContent(runs.watch(subject), notebooks, open, trans) });
    this.id = `nbdist-run-${subject}`;
    this.title.closable = true;
    this.title.icon = icon;
    const args = { id: subject };
    const board = new CommandToolbarButton({ commands, id: Commands.openBoard, args });
    this.toolbar.addItem('spacer', Toolbar.createSpacerItem());
    this.toolbar.addItem('tensorboard', board);
  }
}

class RunContent extends Widget {
  constructor(
    private readonly watch: IWatch,
    notebooks: CurrentNotebook,
    openWorkerOf: (rank: number) => void,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.addClass('nbdist-RunTab');
    this.title.label = trans.__('Run');
    const stop = (): Promise<boolean> => watch.stop();
    const showError = (): boolean => notebooks.show(watch.model.state?.cell ?? '');
    const { loadMedia } = watch;
    const actions = { stop, showError, openWorker: openWorkerOf, loadMedia };
    this.view = new RunView(this.node, watch.model, actions, translateWith(trans));
    this.stopListening = watch.model.subscribe(() => this.name());
    this.name();
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this.stopListening();
      this.view.dispose();
      this.watch.dispose();
      super.dispose();
    }
  }

  private name(): void {
    const state = this.watch.model.state;
    if (state !== null) {
      this.title.label = runTitle(state, this.trans);
      this.title.caption = state.header;
    }
  }

  private readonly view: RunView;
  private readonly stopListening: () => void;
}
