import type { ILayoutRestorer, JupyterFrontEnd } from '@jupyterlab/application';
import { WidgetTracker } from '@jupyterlab/apputils';
import type { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';
import { nbdistIcon } from '../icon';
import { Commands } from './commands';
import type { PanelParts } from './panel';
import { PlacementTab } from './placementtab';

/** The tabs that show where arrays are: one for each cluster, and back after a reload. */
export class PlacementTabs {
  /**
   * @param area where the shell has room for them: Notebook 7 has none beside the notebook.
   */
  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly parts: PanelParts,
    private readonly registry: IRenderMimeRegistry,
    private readonly area: 'main' | 'right'
  ) {}

  addCommand(): void {
    const { commands } = this.app;
    const { server, notebook, trans } = this.parts;
    const description = 'Which cluster; that of the notebook, else the first, if left out';
    commands.addCommand(Commands.openPlacement, {
      label: trans.__('Show where arrays are'),
      describedBy: { args: { type: 'object', properties: { id: { type: 'string', description } } } },
      isEnabled: args => this.cluster(args) !== '',
      execute: args => this.open(this.cluster(args))
    });
    const tell = (): void => commands.notifyCommandChanged(Commands.openPlacement);
    server.changed.connect(tell);
    notebook.changed.connect(tell);
  }

  restore(restorer: ILayoutRestorer): void {
    void restorer.restore(this.tracker, {
      command: Commands.openPlacement,
      args: tab => ({ id: tab.cluster }),
      name: tab => tab.cluster
    });
  }

  /** The id of the cluster that is meant; '' where there is none. */
  private cluster(args: ReadonlyPartialJSONObject): string {
    const { server, notebook } = this.parts;
    const meant = server.clusterOf(notebook.kernel) ?? server.clusters[0];
    return String(args['id'] ?? meant?.id ?? '');
  }

  private open(cluster: string): void {
    const tab = this.tracker.find(one => one.cluster === cluster) ?? this.create(cluster);
    this.app.shell.activateById(tab.id);
  }

  private create(cluster: string): PlacementTab {
    const tab = new PlacementTab(cluster, this.parts, this.registry, nbdistIcon);
    this.app.shell.add(tab, this.area);
    void this.tracker.add(tab);
    return tab;
  }

  private readonly tracker = new WidgetTracker<PlacementTab>({ namespace: 'nbdist-placements' });
}
