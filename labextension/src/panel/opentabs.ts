import type { ILayoutRestorer, JupyterFrontEnd } from '@jupyterlab/application';
import { WidgetTracker } from '@jupyterlab/apputils';
import type { Widget } from '@lumino/widgets';

/** Tab of the main area for one run or one cluster. */
export interface ITab extends Widget {
  /** Id of the run or the cluster. */
  readonly subject: string;
}

/** Open tabs of one kind, at most one per subject. A page reload restores them. */
export class OpenTabs<T extends ITab> {
  /**
   * @param area area of the shell that has room for the tabs. Notebook 7 has only `right`.
   * @param namespace key of the tabs in the saved state of the page.
   * @param command command that opens a tab, with its subject as `id`.
   */
  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly area: 'main' | 'right',
    namespace: string,
    private readonly command: string,
    private readonly create: (subject: string) => T
  ) {
    this.tracker = new WidgetTracker<T>({ namespace });
  }

  open(subject: string): void {
    const tab = this.tracker.find(one => one.subject === subject) ?? this.add(subject);
    this.app.shell.activateById(tab.id);
  }

  restore(restorer: ILayoutRestorer): void {
    void restorer.restore(this.tracker, {
      command: this.command,
      args: tab => ({ id: tab.subject }),
      name: tab => tab.subject
    });
  }

  private add(subject: string): T {
    const tab = this.create(subject);
    this.app.shell.add(tab, this.area);
    void this.tracker.add(tab);
    return tab;
  }

  private readonly tracker: WidgetTracker<T>;
}
