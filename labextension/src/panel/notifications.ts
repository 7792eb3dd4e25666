import { Dialog, showDialog } from '@jupyterlab/apputils';
import type { IDisposable } from '@lumino/disposable';
import type { IRunState } from '../records';
import type { IFigures } from '../run/figures';
import { isOpen, RUN_LOOKS } from '../run/status';
import { Commands, labelled } from './commands';
import { newsOf, shortProgress } from './news';
import { PageTitle } from './pagetitle';
import type { IPanelParts } from './panel';
import type { IRunEvent } from './runevents';
import { RunEvents } from './runevents';

/**
 * News for a user who looks elsewhere: the progress in the title of the page, and notifications of
 * the browser. They are about runs of notebooks that are open in this page.
 */
export class Notifications implements IDisposable {
  constructor(private readonly parts: IPanelParts) {
    parts.server.changed.connect(this.look, this);
    parts.figures.changed.connect(this.look, this);
    document.addEventListener('visibilitychange', this.onReturn);
    window.addEventListener('focus', this.onReturn);
  }

  isDisposed = false;

  /** Add the command that turns notifications on and off. */
  addCommand(): void {
    const { commands, preferences, trans } = this.parts;
    commands.addCommand(Commands.toggleNotifications, {
      label: labelled(trans.__('Notify when runs end')),
      caption: trans.__('Show a notification of the browser when a run ends, fails or recovers'),
      describedBy: { args: { type: 'object', properties: {} } },
      isToggleable: true,
      isToggled: () => preferences.notifications,
      execute: async () => {
        if (preferences.notifications || (await this.askPermission())) {
          await preferences.setNotifications(!preferences.notifications);
        }
      }
    });
    preferences.changed.connect(() => commands.notifyCommandChanged(Commands.toggleNotifications));
  }

  dispose(): void {
    this.isDisposed = true;
    document.removeEventListener('visibilitychange', this.onReturn);
    window.removeEventListener('focus', this.onReturn);
    this.title.dispose();
  }

  /**
   * Request permission to show notifications. If the browser refuses it, a dialog explains why, and
   * the result is false.
   */
  private async askPermission(): Promise<boolean> {
    const { trans } = this.parts;
    const isSupported = window.isSecureContext && 'Notification' in window;
    if (isSupported && (await Notification.requestPermission()) === 'granted') {
      return true;
    }
    await showDialog({
      title: trans.__('No notifications'),
      body: isSupported
        ? trans.__(
            'The browser blocks notifications of this page. Allow them in its site settings.'
          )
        : trans.__('Browsers show notifications only of pages with https and of localhost.'),
      buttons: [Dialog.okButton()]
    });
    return false;
  }

  private look(): void {
    const { server, figures, notebook } = this.parts;
    if (server.trouble !== 'none') {
      return;
    }
    // A socket delivers the state of a run before the next poll does.
    const runs = server.runs.map(run => figures.stateOf(run.id) ?? run);
    const events = this.events.take(runs).filter(({ run }) => notebook.contains(run.cell));
    events.forEach(event => this.announce(event));
    const running = runs.find(run => isOpen(run.status) && notebook.contains(run.cell));
    if (running === undefined) {
      this.last.clear();
      this.title.show(this.ended);
    } else {
      const now = figures.of(running.id);
      this.last.set(running.id, now);
      this.title.show(shortProgress(running, now));
    }
  }

  private announce(event: IRunEvent): void {
    if (!isAway()) {
      return;
    }
    const { run } = event;
    if (!isOpen(run.status)) {
      this.ended = RUN_LOOKS[run.status].sign;
    }
    if (this.parts.preferences.notifications && Notification.permission === 'granted') {
      this.notify(event);
    }
  }

  private notify(event: IRunEvent): void {
    const { run, kind } = event;
    const { trans, figures } = this.parts;
    const { title, body } = newsOf(event, this.last.get(run.id) ?? figures.of(run.id), trans);
    // The browser replaces a notification with the same tag: several pages may show one run.
    const shown = new Notification(title, { body, tag: `${run.id} ${kind}` });
    shown.onclick = () => {
      shown.close();
      window.focus();
      this.show(run);
    };
  }

  private show(run: IRunState): void {
    const { notebook, commands } = this.parts;
    if (!notebook.show(run.cell)) {
      void commands.execute(Commands.openRun, { id: run.id });
    }
  }

  /** Remove the sign of an ended run when the user returns to the page. */
  private readonly onReturn = (): void => {
    if (!isAway() && this.ended !== '') {
      this.ended = '';
      this.look();
    }
  };

  /** Sign of a run that ended while the user was away. */
  private ended = '';
  private readonly events = new RunEvents();
  private readonly title = new PageTitle();
  /** Last figures of runs: their connection is closed when they have ended. */
  private readonly last = new Map<string, IFigures>();
}

function isAway(): boolean {
  return document.hidden || !document.hasFocus();
}
