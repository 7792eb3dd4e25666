import type { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import * as React from 'react';
import { Cluster, StartForm } from './clusters';
import { openWorker } from '../worker/tabs';
import type { ISnippet } from './code';
import { Commands } from './commands';
import type { RunningFigures } from './figures';
import type { ServerModel } from './model';
import type { CurrentNotebook } from './notebook';
import type { Preferences } from './preferences';
import { Runs } from './runs';

/** Models and services of the panel. */
export interface IPanelParts {
  readonly server: ServerModel;
  readonly figures: RunningFigures;
  readonly notebook: CurrentNotebook;
  readonly preferences: Preferences;
  readonly commands: CommandRegistry;
  readonly trans: TranslationBundle;
}

/** Sidebar with clusters, runs and snippets. Each action is also a command or a magic. */
export class Panel extends ReactWidget {
  constructor(private readonly parts: IPanelParts) {
    super();
    this.id = 'nbdist-panel';
    this.addClass('nbdist-Panel');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', parts.trans.__('nbdist clusters and runs'));
    parts.server.changed.connect(this.draw, this);
    parts.figures.changed.connect(this.draw, this);
    parts.notebook.changed.connect(this.draw, this);
    parts.preferences.changed.connect(this.draw, this);
  }

  protected override render(): React.JSX.Element {
    const { server, figures, preferences, trans } = this.parts;
    return (
      <>
        {this.head()}
        {this.trouble()}
        <Section title={trans.__('Clusters')}>
          {this.start()}
          {server.clusters.map(cluster => this.cluster(cluster.id))}
        </Section>
        <Section title={trans.__('Runs')}>
          <button
            type="button"
            className="jp-mod-styled nbdist-Small"
            onClick={() => this.execute(Commands.openRuns, {})}
          >
            {trans.__('All runs')}
          </button>
          <label className="nbdist-Notify">
            <input
              type="checkbox"
              checked={preferences.notifications}
              onChange={() => this.execute(Commands.toggleNotifications, {})}
            />
            {trans.__('Notify when runs end')}
          </label>
          <Runs
            runs={server.runs}
            refused={server.refused}
            figuresOf={id => figures.of(id)}
            trans={trans}
            onOpen={id => this.execute(Commands.openRun, { id })}
            onStop={id => this.execute(Commands.stopRun, { id })}
          />
        </Section>
        <Section title={trans.__('Snippets')}>
          <ul className="nbdist-Snippets">{preferences.snippets.map(s => this.snippet(s))}</ul>
        </Section>
      </>
    );
  }

  private head(): React.JSX.Element {
    const { trans } = this.parts;
    const link = (command: string, text: string): React.JSX.Element => (
      <button type="button" className="nbdist-Link" onClick={() => this.execute(command, {})}>
        {text}
      </button>
    );
    return (
      <div className="nbdist-Head">
        <h1>{trans.__('nbdist')}</h1>
        {link(Commands.openExample, trans.__('Example'))}
        {link(Commands.openDocumentation, trans.__('Documentation'))}
      </div>
    );
  }

  private trouble(): React.JSX.Element | null {
    const { server, trans } = this.parts;
    if (server.trouble === 'none') {
      return null;
    }
    const text =
      server.trouble === 'unserved'
        ? trans.__(
            'nbdist is not installed on the Jupyter server. Install it there and restart the server.'
          )
        : trans.__('The Jupyter server does not respond.');
    return (
      <p role="alert" className="nbdist-Error">
        {text}
      </p>
    );
  }

  private start(): React.JSX.Element | null {
    const { server, notebook, preferences, trans } = this.parts;
    if (server.clusterOf(notebook.kernel) !== undefined) {
      return null;
    }
    return (
      <StartForm
        startOptions={preferences.startOptions}
        notebook={notebook.title}
        trans={trans}
        onChange={startOptions => preferences.setStartOptions(startOptions)}
        onStart={startOptions => this.execute(Commands.startCluster, { ...startOptions })}
      />
    );
  }

  private cluster(id: string): React.JSX.Element | null {
    const { server, notebook, trans } = this.parts;
    const cluster = server.clusters.find(one => one.id === id);
    return cluster === undefined ? null : (
      <Cluster
        key={`${id} ${cluster.workers.length}`}
        cluster={cluster}
        notebook={notebook.titleOf(cluster.kernel)}
        trans={trans}
        onWorker={rank => openWorker(this.parts.commands, id, rank)}
        onArrays={() => this.execute(Commands.openPlacement, { id })}
        onResize={hosts => this.execute(Commands.resizeCluster, { id, hosts })}
        onStop={() => this.execute(Commands.stopCluster, { id })}
      />
    );
  }

  private snippet(snippet: ISnippet): React.JSX.Element {
    const { notebook, trans } = this.parts;
    return (
      <li key={snippet.label}>
        <button
          type="button"
          className="nbdist-Link"
          disabled={!notebook.isThere}
          title={
            notebook.isThere ? trans.__('Insert as a cell') : trans.__('Open a notebook first')
          }
          onClick={() => this.execute(Commands.insertSnippet, { label: snippet.label })}
        >
          {snippet.label}
        </button>
      </li>
    );
  }

  private execute(command: string, args: Readonly<Record<string, string | number>>): void {
    void this.parts.commands.execute(command, args);
  }

  private draw(): void {
    this.update();
  }
}

interface ISectionProps {
  readonly title: string;
  readonly children: React.ReactNode;
}

function Section({ title, children }: ISectionProps): React.JSX.Element {
  return (
    <details className="nbdist-Section" open>
      <summary>
        <h2>{title}</h2>
      </summary>
      {children}
    </details>
  );
}
