import { make, newId } from './dom';

export interface ITab {
  readonly key: string;
  readonly title: string;
}

/** Tabs selected by a click, the arrow keys, Home or End. */
export class Tabs {
  readonly root: HTMLElement;
  /** Content of the selected tab. */
  readonly panel: HTMLElement;
  chosen = 0;
  private readonly buttons: HTMLButtonElement[];

  constructor(
    private readonly tabs: readonly ITab[],
    label: string,
    private readonly changed: () => void
  ) {
    const id = newId('panel');
    this.buttons = tabs.map((tab, i) => this.button(tab, i, id));
    this.root = make('div', 'tabs', { role: 'tablist', 'aria-label': label }, ...this.buttons);
    this.root.addEventListener('keydown', event => this.move(event));
    this.panel = make('div', 'panel', { role: 'tabpanel', id });
    this.mark();
  }

  private button({ title }: ITab, i: number, panel: string): HTMLButtonElement {
    const id = newId('tab');
    const attributes = { type: 'button', role: 'tab', id, 'aria-controls': panel };
    const button = make('button', 'tab', attributes, title);
    button.addEventListener('click', () => this.choose(i));
    return button;
  }

  private move(event: KeyboardEvent): void {
    const isBackward = getComputedStyle(this.root).direction === 'rtl';
    const by = isBackward ? -1 : 1;
    const last = this.tabs.length - 1;
    const targets: Readonly<Record<string, number>> = {
      ArrowRight: (this.chosen + by + last + 1) % (last + 1),
      ArrowLeft: (this.chosen - by + last + 1) % (last + 1),
      Home: 0,
      End: last
    };
    const target = targets[event.key];
    if (target !== undefined) {
      event.preventDefault();
      event.stopPropagation();
      this.choose(target);
      this.buttons[target]?.focus();
    }
  }

  private choose(i: number): void {
    if (i !== this.chosen) {
      this.chosen = i;
      this.mark();
      this.changed();
    }
  }

  private mark(): void {
    this.buttons.forEach((button, i) => {
      button.setAttribute('aria-selected', String(i === this.chosen));
      button.tabIndex = i === this.chosen ? 0 : -1;
    });
    this.panel.setAttribute('aria-labelledby', this.buttons[this.chosen]?.id ?? '');
  }
}
