import type { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import * as React from 'react';
import type { RunningFigures } from './figures';
import type { ServerModel } from './model';
import { rate } from './words';

/** Item of the status bar: number of workers and throughput of the active run. */
export class StatusItem extends ReactWidget {
  constructor(
    private readonly server: ServerModel,
    private readonly figures: RunningFigures,
    private readonly trans: TranslationBundle,
    private readonly open: () => void
  ) {
    super();
    this.addClass('jp-mod-highlighted');
    server.changed.connect(this.draw, this);
    figures.changed.connect(this.draw, this);
  }

  /** The item is shown only while there are clusters. */
  get isActive(): boolean {
    return this.server.clusters.length > 0;
  }

  protected override render(): React.JSX.Element {
    return (
      <button
        type="button"
        className="nbdist-StatusItem"
        title={this.trans.__('Open the nbdist panel')}
        onClick={this.open}
      >
        {this.text()}
      </button>
    );
  }

  private text(): string {
    const { server, figures, trans } = this;
    const workers = server.clusters.reduce((sum, cluster) => sum + cluster.workers.length, 0);
    const running = server.running[0];
    const speed = running === undefined ? '' : rate(figures.of(running.id), trans);
    const count = trans._n('%1 worker', '%1 workers', workers);
    return `nbdist: ${[count, speed].filter(part => part !== '').join(' · ')}`;
  }

  private draw(): void {
    this.update();
  }
}
