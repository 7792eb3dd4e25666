import type { Finding, RunState } from '../records';
import { make } from './dom';
import type { Say } from './words';

/** What is worth a line about a run: what was seen and what to type; and why it failed. */
export class Notes {
  readonly root = make('div', 'notes');
  private shown = '';

  constructor(private readonly say: Say) {}

  draw(state: RunState | null): void {
    const findings = state?.findings ?? [];
    const error = state?.error ?? '';
    const content = JSON.stringify([findings, error]);
    if (content === this.shown) {
      return;
    }
    this.shown = content;
    const parts: HTMLElement[] = error === '' ? [] : [this.failure(error)];
    if (findings.length > 0) {
      const name = this.say('What was found');
      const lines = findings.map(finding => this.line(finding));
      parts.push(make('ul', 'findings', { 'aria-label': name }, ...lines));
    }
    this.root.replaceChildren(...parts);
  }

  private line({ text, warning }: Finding): HTMLElement {
    const sign = make('span', 'sign', { 'aria-hidden': 'true' }, warning ? '▲' : 'i');
    const word = make('span', 'hidden', {}, this.say(warning ? 'warning:' : 'note:') + ' ');
    const words = make('span', '', {}, word, ...withCode(text));
    const line = make('li', 'finding', {}, sign, words);
    line.dataset['warning'] = String(warning);
    return line;
  }

  private failure(error: string): HTMLElement {
    const name = this.say('Error of the run');
    return make('pre', 'error', { role: 'group', 'aria-label': name, tabindex: 0 }, error);
  }
}

/** What stands between backquotes is to be typed. */
function withCode(text: string): (Node | string)[] {
  return text
    .split('`')
    .map((part, i) => (i % 2 === 1 ? make('code', '', {}, part) : part))
    .filter(part => part !== '');
}
