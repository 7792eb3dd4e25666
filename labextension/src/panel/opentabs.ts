import type { ILayoutRestorer, JupyterFrontEnd } from '@jupyterlab/application';
import { WidgetTracker } from '@jupyterlab/apputils';
import type { Widget } from '@lumino/widgets';

/** A tab that shows one thing. */
export interface ITab extends Widget {
  /** The id of what it shows. */
  readonly subject: string;
}

/** The open tabs of one kind: one for each thing, and back after a reload of the page. */
export class OpenTabs<T extends ITab> {
  /**
   * @param area where the shell has room for them: Notebook 7 has none beside the notebook.
   * @param namespace what the page's saved state has them under.
   * @param command what opens one, given its subject as `id`.
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
