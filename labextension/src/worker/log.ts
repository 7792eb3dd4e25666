import { Disposables, make, setText } from '../run/dom';
import type { Translate } from '../run/words';
import { count, fill } from '../run/words';
import { matching, terminalLines } from './lines';

/** A log that is scrolled to within this distance of its end follows new lines. */
const NEAR_END_PIXELS = 8;

/** Log of a worker: it follows new lines while its end is visible, and shows matching lines. */
export class Log {
  readonly root: HTMLElement;
  private readonly disposables = new Disposables();
  private readonly search: HTMLInputElement;
  private readonly found = make('output', 'faint');
  private readonly empty: HTMLElement;
  private readonly lines: HTMLElement;
  private text = '';
  private isFollowing = true;

  constructor(private readonly translate: Translate) {
    const label = translate('Search the log');
    this.search = make('input', 'search', {
      type: 'search',
      placeholder: label,
      'aria-label': label
    });
    this.empty = make('p', 'empty', {}, translate('This worker has printed nothing.'));
    this.lines = make('pre', 'log', { tabindex: 0, role: 'group', 'aria-label': translate('Log') });
    this.lines.hidden = true;
    const bar = make('div', 'toolbar', {}, this.search, this.found);
    this.root = make('div', 'worker-log', {}, bar, this.empty, this.lines);
    this.disposables.listen(this.search, 'input', () => this.show());
    this.disposables.listen(this.lines, 'scroll', () => this.notePlace());
  }

  draw(text: string): void {
    if (text !== this.text) {
      this.text = text;
      this.show();
    }
  }

  dispose(): void {
    this.disposables.dispose();
  }

  /** Scroll to the end if the log follows it. Call after the log appears. */
  follow(): void {
    if (this.isFollowing) {
      this.lines.scrollTop = this.lines.scrollHeight;
    }
  }

  private show(): void {
    const all = terminalLines(this.text);
    const wanted = this.search.value;
    const shown = wanted === '' ? all : matching(all, wanted);
    const total = all.length - (all[all.length - 1] === '' ? 1 : 0);
    const words = fill(this.translate('{0} of {1} lines'), count(shown.length), count(total));
    setText(this.found, wanted === '' ? '' : words);
    this.empty.hidden = this.text !== '';
    this.lines.hidden = this.text === '';
    this.replace(shown.join('\n'));
    this.follow();
  }

  /** Replace the text. An appended part leaves the rest in place, and so the selection. */
  private replace(text: string): void {
    const before = this.lines.textContent;
    if (before !== '' && text.startsWith(before)) {
      this.lines.append(text.slice(before.length));
    } else {
      this.lines.textContent = text;
    }
  }

  private notePlace(): void {
    const { scrollTop, scrollHeight, clientHeight } = this.lines;
    this.isFollowing = scrollHeight - clientHeight - scrollTop < NEAR_END_PIXELS;
  }
}
