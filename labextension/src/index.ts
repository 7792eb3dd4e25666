import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILabShell, ILayoutRestorer } from '@jupyterlab/application';
import { ICommandPalette, showErrorMessage } from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStateDB } from '@jupyterlab/statedb';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { Token } from '@lumino/coreutils';
import { Signal } from '@lumino/signaling';
import { cardPicture, nbdistIcon } from './icon';
import { LiveRuns } from './live';
import { rendererFactory, timelineFactory } from './mime';
import { Actions } from './panel/actions';
import { addBoards } from './panel/boards';
import { Commands, labelled } from './panel/commands';
import { Help } from './panel/example';
import { RunningFigures } from './panel/figures';
import { ServerModel } from './panel/model';
import { CurrentNotebook } from './panel/notebook';
import { Notifications } from './panel/notifications';
import type { IPanelParts } from './panel/panel';
import { Panel } from './panel/panel';
import { PlacementTabs } from './panel/placementtabs';
import { Preferences } from './panel/preferences';
import { StatusItem } from './panel/status';
import { addRunsTab } from './panel/runstab';
import { RunTabs } from './panel/tabs';
import { RevivedNotebook } from './revive/notebook';

const PANEL_PLUGIN = 'nbdist:panel';

/** Rank of the run renderer: before all other MIME types of an output. */
const MIME_RANK = -20;
/** Rank of the sidebar: below the file browser, the running kernels and the table of contents. */
const PANEL_RANK = 600;

/** Rank of the launcher's card: after the kernels. */
const LAUNCHER_RANK = 100;

const ILiveRuns = new Token<LiveRuns>('nbdist:ILiveRuns', 'Connections of the page to runs.');
const IPanelParts = new Token<IPanelParts>(
  'nbdist:IPanelParts',
  'Models and services of the panel.'
);

const live: JupyterFrontEndPlugin<LiveRuns> = {
  id: 'nbdist:live',
  description: 'Shares one connection per run between all views.',
  autoStart: true,
  provides: ILiveRuns,
  optional: [ITranslator],
  activate: (app: JupyterFrontEnd, translator: ITranslator | null) => {
    const trans = (translator ?? nullTranslator).load('nbdist');
    const onRefused = (error: Error): void =>
      void showErrorMessage(trans.__('nbdist: the job cannot be stopped'), error);
    return new LiveRuns(app.serviceManager.serverSettings, onRefused);
  }
};

const mime: JupyterFrontEndPlugin<void> = {
  id: 'nbdist:mime',
  description: 'Renders runs and traces in cell outputs.',
  autoStart: true,
  requires: [ILiveRuns, IRenderMimeRegistry],
  optional: [ITranslator],
  activate: (
    app: JupyterFrontEnd,
    runs: LiveRuns,
    registry: IRenderMimeRegistry,
    translator: ITranslator | null
  ) => {
    const trans = (translator ?? nullTranslator).load('nbdist');
    registry.addFactory(rendererFactory(runs, app.commands, trans), MIME_RANK);
    registry.addFactory(timelineFactory(registry, trans), MIME_RANK);
  }
};

const panel: JupyterFrontEndPlugin<IPanelParts> = {
  id: PANEL_PLUGIN,
  description: 'Shows clusters and runs in the sidebar and adds their commands.',
  autoStart: true,
  provides: IPanelParts,
  requires: [ILiveRuns, INotebookTracker],
  optional: [ILabShell, ILayoutRestorer, ISettingRegistry, IStateDB, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    runs: LiveRuns,
    tracker: INotebookTracker,
    labShell: ILabShell | null,
    restorer: ILayoutRestorer | null,
    settings: ISettingRegistry | null,
    states: IStateDB | null,
    translator: ITranslator | null
  ) => {
    const trans = (translator ?? nullTranslator).load('nbdist');
    const server = new ServerModel(app.serviceManager.serverSettings);
    const figures = new RunningFigures(server, runs);
    const notebook = new CurrentNotebook(tracker, app);
    const preferences = new Preferences(states);
    const parts = { server, figures, notebook, preferences, commands: app.commands, trans };
    preferences.changed.connect(() => server.setInterval(preferences.poll_s));
    void preferences.load(settings, PANEL_PLUGIN);
    server.changed.connect(() => runs.rename(server.runs));

    const sidebar = new Panel(parts);
    sidebar.title.icon = nbdistIcon;
    sidebar.title.caption = trans.__('nbdist');
    app.shell.add(sidebar, 'left', { rank: PANEL_RANK });
    restorer?.add(sidebar, sidebar.id);
    app.commands.addCommand(Commands.openPanel, {
      label: labelled(trans.__('Open panel')),
      describedBy: { args: { type: 'object', properties: {} } },
      execute: () => app.shell.activateById(sidebar.id)
    });

    const area = labShell === null ? 'right' : 'main';
    const tabs = new RunTabs(app, runs, server, notebook, trans, area);
    tabs.addCommands();
    if (restorer !== null) {
      tabs.restore(restorer);
    }
    new Actions(parts, runs).addTo(app);
    new Help(app, trans).addCommands();
    new Notifications(parts).addCommand();
    return parts;
  }
};

const placement: JupyterFrontEndPlugin<void> = {
  id: 'nbdist:placement',
  description: 'Shows the array placement of a cluster in a tab.',
  autoStart: true,
  requires: [IPanelParts, IRenderMimeRegistry],
  optional: [ILabShell, ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    parts: IPanelParts,
    registry: IRenderMimeRegistry,
    labShell: ILabShell | null,
    restorer: ILayoutRestorer | null
  ) => {
    const tabs = new PlacementTabs(app, parts, registry, labShell === null ? 'right' : 'main');
    tabs.addCommand();
    if (restorer !== null) {
      tabs.restore(restorer);
    }
  }
};

const allRuns: JupyterFrontEndPlugin<void> = {
  id: 'nbdist:runs',
  description: 'Shows all stored runs in a tab, and TensorBoard on them.',
  autoStart: true,
  requires: [IPanelParts, INotebookTracker, IRenderMimeRegistry],
  optional: [ILabShell, ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    parts: IPanelParts,
    tracker: INotebookTracker,
    registry: IRenderMimeRegistry,
    labShell: ILabShell | null,
    restorer: ILayoutRestorer | null
  ) => {
    const area = labShell === null ? 'right' : 'main';
    addRunsTab({ app, area, registry, tracker, trans: parts.trans }, restorer);
    addBoards({ app, area, trans: parts.trans }, restorer);
  }
};

const palette: JupyterFrontEndPlugin<void> = {
  id: 'nbdist:palette',
  description: 'Adds the commands to the command palette.',
  autoStart: true,
  requires: [IPanelParts],
  optional: [ICommandPalette],
  activate: (_: JupyterFrontEnd, parts: IPanelParts, commandPalette: ICommandPalette | null) => {
    const category = parts.trans.__('nbdist');
    const needsSubject: readonly string[] = [Commands.openRun, Commands.openWorker];
    for (const command of Object.values(Commands).filter(name => !needsSubject.includes(name))) {
      commandPalette?.addItem({ command, category, args: { isPalette: true } });
    }
  }
};

const launcher: JupyterFrontEndPlugin<void> = {
  id: 'nbdist:launcher',
  description: 'Adds a card for the example notebooks to the launcher.',
  autoStart: true,
  requires: [IPanelParts],
  optional: [ILauncher],
  activate: (_: JupyterFrontEnd, parts: IPanelParts, cards: ILauncher | null) => {
    cards?.add({
      command: Commands.openExample,
      args: { isLauncher: true },
      category: parts.trans.__('Notebook'),
      kernelIconUrl: cardPicture(),
      rank: LAUNCHER_RANK
    });
  }
};

const status: JupyterFrontEndPlugin<void> = {
  id: 'nbdist:status',
  description: 'Shows workers and samples per second in the status bar.',
  autoStart: true,
  requires: [IPanelParts],
  optional: [IStatusBar],
  activate: (app: JupyterFrontEnd, parts: IPanelParts, statusBar: IStatusBar | null) => {
    if (statusBar === null) {
      return; // Notebook 7 has no status bar
    }
    const { server, figures, trans } = parts;
    const open = (): void => void app.commands.execute(Commands.openPanel);
    const item = new StatusItem(server, figures, trans, open);
    const activeStateChanged = new Signal<StatusItem, void>(item);
    server.changed.connect(() => activeStateChanged.emit());
    const isActive = (): boolean => item.isActive;
    statusBar.registerStatusItem('nbdist:status', { item, isActive, activeStateChanged });
  }
};

const revive: JupyterFrontEndPlugin<void> = {
  id: 'nbdist:revive',
  description: 'Restores the outputs of running cells after a page reload.',
  autoStart: true,
  requires: [IPanelParts, INotebookTracker],
  activate: (app: JupyterFrontEnd, parts: IPanelParts, tracker: INotebookTracker) => {
    const { serverSettings } = app.serviceManager;
    const follow = (_: INotebookTracker, panel: NotebookPanel): void => {
      const revived = new RevivedNotebook(panel, tracker, parts.server, serverSettings);
      panel.disposed.connect(() => revived.dispose());
    };
    tracker.forEach(panel => follow(tracker, panel));
    tracker.widgetAdded.connect(follow);
  }
};

export default [live, mime, panel, placement, allRuns, palette, launcher, status, revive];
