import type { JupyterFrontEnd } from '@jupyterlab/application';
import { InputDialog } from '@jupyterlab/apputils';
import type { ReadonlyJSONObject, ReadonlyPartialJSONObject } from '@lumino/coreutils';
import type { LiveRuns } from '../live';
import type { IClusterState, IRunState } from '../records';
import { stopWords } from '../run/status';
import { translateWith } from '../translate';
import { STOP_CLUSTER, filled, resizeCode, startCode } from './code';
import { Commands, labelled } from './commands';
import type { IPanelParts } from './panel';

type Args = ReadonlyPartialJSONObject;

const ID = { id: { type: 'string', description: 'Id (default: that of the notebook)' } };
const HOSTS = { hosts: { type: 'integer', minimum: 1, description: 'Number of hosts' } };
const FRAMEWORK = { framework: { type: 'string', enum: ['', 'tensorflow', 'jax'] } };
const LABEL = {
  label: { type: 'string', description: 'Label of the snippet (default: ask the user)' }
};

/** Commands that act on a notebook, a cluster or a run. */
export class Actions {
  constructor(
    private readonly parts: IPanelParts,
    private readonly runs: LiveRuns
  ) {}

  /**
   * Add the commands. Their enabled state is updated with each change of the server or the
   * notebook.
   */
  addTo(app: JupyterFrontEnd): void {
    const { server, notebook, trans } = this.parts;
    const add = (
      id: string,
      label: string,
      properties: ReadonlyJSONObject,
      execute: (args: Args) => unknown,
      isEnabled: (args: Args) => boolean,
      caption: (args: Args) => string = () => ''
    ): void => {
      const describedBy = { args: { type: 'object', properties } };
      app.commands.addCommand(id, {
        label: labelled(label),
        caption,
        describedBy,
        execute,
        isEnabled
      });
      server.changed.connect(() => app.commands.notifyCommandChanged(id));
      notebook.changed.connect(() => app.commands.notifyCommandChanged(id));
    };
    const hasCluster = (args: Args): boolean => this.cluster(args) !== undefined;
    const canStart = (): boolean => !hasCluster({});
    const isRunning = (args: Args): boolean => this.run(args)?.status === 'running';

    add(
      Commands.startCluster,
      trans.__('Start cluster'),
      { ...HOSTS, ...FRAMEWORK },
      args => this.start(args),
      canStart
    );
    add(
      Commands.stopCluster,
      trans.__('Stop cluster'),
      ID,
      args => this.stopCluster(args),
      hasCluster
    );
    add(
      Commands.resizeCluster,
      trans.__('Resize cluster'),
      { ...ID, ...HOSTS },
      args => this.resize(args),
      hasCluster
    );
    add(
      Commands.stopRun,
      trans.__('Stop run'),
      ID,
      args => this.stopRun(args),
      isRunning,
      args => {
        const run = this.run(args);
        return run?.status === 'running'
          ? translateWith(trans)(stopWords(run).how)
          : trans.__('No run is active');
      }
    );
    add(
      Commands.insertSnippet,
      trans.__('Insert snippet'),
      LABEL,
      args => this.insert(args),
      () => notebook.isThere
    );
  }

  private async start(args: Args): Promise<void> {
    const { notebook, preferences } = this.parts;
    const { hosts, framework } = { ...preferences.startOptions, ...args };
    const kernel = notebook.kernel === '' ? await notebook.create() : notebook.kernel;
    await this.runCell(startCode({ hosts, framework }), kernel);
  }

  private async stopCluster(args: Args): Promise<void> {
    await this.runCell(STOP_CLUSTER, this.cluster(args)?.kernel ?? '');
  }

  private async resize(args: Args): Promise<void> {
    const cluster = this.cluster(args);
    const hosts = args['hosts'] ?? (await this.askHosts());
    if (cluster !== undefined && typeof hosts === 'number') {
      await this.runCell(resizeCode(hosts), cluster.kernel);
    }
  }

  private async stopRun(args: Args): Promise<void> {
    await this.parts.server.refresh(); // another run may have started since the last response
    const run = this.run(args);
    if (run !== undefined) {
      await this.runs.stop(run);
    }
  }

  private async insert(args: Args): Promise<void> {
    const { notebook, preferences } = this.parts;
    const label = args['label'] ?? (await this.askSnippet());
    const snippet = preferences.snippets.find(one => one.label === label);
    if (snippet !== undefined) {
      notebook.insert(filled(snippet, preferences.startOptions.hosts));
    }
  }

  private async runCell(code: string, kernel: string): Promise<void> {
    await this.parts.notebook.run(code, kernel);
    await this.parts.server.refresh();
  }

  /** Return the named cluster, or that of the notebook. */
  private cluster(args: Args): IClusterState | undefined {
    const { server, notebook } = this.parts;
    return args['id'] === undefined
      ? server.clusterOf(notebook.kernel)
      : server.clusters.find(one => one.id === args['id']);
  }

  /** Return the named run, that of the notebook, or the newest running one, in this order. */
  private run(args: Args): IRunState | undefined {
    const { server, notebook } = this.parts;
    return args['id'] === undefined
      ? (server.runOf(notebook.kernel) ?? server.running[0])
      : server.runs.find(one => one.id === args['id']);
  }

  private async askHosts(): Promise<number | null> {
    const { preferences, trans } = this.parts;
    const title = trans.__('Number of hosts');
    return (await InputDialog.getNumber({ title, value: preferences.startOptions.hosts })).value;
  }

  private async askSnippet(): Promise<string | null> {
    const { preferences, trans } = this.parts;
    const items = preferences.snippets.map(one => one.label);
    return (await InputDialog.getItem({ title: trans.__('Insert snippet'), items })).value;
  }
}
