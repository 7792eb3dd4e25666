import { make, setText } from './dom';
import { summaryOf } from './errors';
import type { Translate } from './words';

/** Error of the run in one line, with a link to the full text in the output of the cell. */
export class Failure {
  readonly root: HTMLElement;
  private readonly line = make('span', 'failure-text');
  private readonly link: HTMLButtonElement;
  private readonly full: HTMLElement;

  /**
   * @param show function that shows the output of the cell. Returns false if the page does not
   *     contain it: then the view shows the full text.
   */
  constructor(
    private readonly translate: Translate,
    private readonly show: () => boolean
  ) {
    const sign = make('span', 'sign', { 'aria-hidden': 'true' }, '✕');
    this.link = make('button', 'link', { type: 'button' }, translate('Show the error'));
    this.link.addEventListener('click', () => this.open());
    const region = { role: 'group', 'aria-label': translate('Error of the run'), tabindex: 0 };
    this.full = make('pre', 'error', region);
    const line = make('p', 'failure-line', {}, sign, this.line, this.link);
    this.root = make('div', 'failure', { hidden: '' }, line, this.full);
    this.full.hidden = true;
  }

  draw(error: string): void {
    this.root.hidden = error === '';
    setText(this.line, summaryOf(error));
    setText(this.full, error);
  }

  private open(): void {
    if (!this.full.hidden || !this.show()) {
      this.full.hidden = !this.full.hidden;
      setText(this.link, this.translate(this.full.hidden ? 'Show the error' : 'Hide the error'));
    }
  }
}
