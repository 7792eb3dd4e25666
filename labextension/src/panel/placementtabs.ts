import type { ILayoutRestorer, JupyterFrontEnd } from '@jupyterlab/application';
import type { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';
import { nbdistIcon } from '../icon';
import { Commands, labelled } from './commands';
import { OpenTabs } from './opentabs';
import type { IPanelParts } from './panel';
import { PlacementTab } from './placementtab';

/** Placement tabs, one per cluster, and the command that opens them. */
export class PlacementTabs {
  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly parts: IPanelParts,
    registry: IRenderMimeRegistry,
    area: 'main' | 'right'
  ) {
    const create = (cluster: string): PlacementTab =>
      new PlacementTab(cluster, parts, registry, nbdistIcon);
    this.tabs = new OpenTabs(app, area, 'nbdist-placements', Commands.openPlacement, create);
  }

  addCommand(): void {
    const { commands } = this.app;
    const { server, notebook, trans } = this.parts;
    const description = 'Cluster id (default: that of the notebook, then the first)';
    commands.addCommand(Commands.openPlacement, {
      label: labelled(trans.__('Show array placement')),
      describedBy: {
        args: { type: 'object', properties: { id: { type: 'string', description } } }
      },
      isEnabled: args => this.cluster(args) !== '',
      execute: args => this.tabs.open(this.cluster(args))
    });
    const notify = (): void => commands.notifyCommandChanged(Commands.openPlacement);
    server.changed.connect(notify);
    notebook.changed.connect(notify);
  }

  restore(restorer: ILayoutRestorer): void {
    this.tabs.restore(restorer);
  }

  /** Return the id of the requested cluster. Empty if there is none. */
  private cluster(args: ReadonlyPartialJSONObject): string {
    const { server, notebook } = this.parts;
    const meant = server.clusterOf(notebook.kernel) ?? server.clusters[0];
    return String(args['id'] ?? meant?.id ?? '');
  }

  private readonly tabs: OpenTabs<PlacementTab>;
}
