import type { IDisposable } from '@lumino/disposable';

/** Text before the title of the page, as in `42 % · train.ipynb - JupyterLab`. */
export class PageTitle implements IDisposable {
  constructor() {
    this.observer = new MutationObserver(() => this.draw());
    this.observer.observe(document.head, { childList: true, subtree: true, characterData: true });
  }

  isDisposed = false;

  /** Show a text before the title that the application has set. An empty text removes it. */
  show(text: string): void {
    const before = this.prefix;
    this.prefix = text === '' ? '' : `${text} · `;
    if (this.prefix !== before) {
      document.title = this.prefix + withoutPrefix(document.title, before);
    }
  }

  dispose(): void {
    this.show('');
    this.isDisposed = true;
    this.observer.disconnect();
  }

  /** Add the text again after the application has set the title. */
  private draw(): void {
    if (!document.title.startsWith(this.prefix)) {
      document.title = this.prefix + document.title;
    }
  }

  private prefix = '';
  private readonly observer: MutationObserver;
}

function withoutPrefix(title: string, prefix: string): string {
  return title.startsWith(prefix) ? title.slice(prefix.length) : title;
}
