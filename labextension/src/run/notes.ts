import type { IFinding, IRecoveryRecord, IRunState } from '../records';
import { make, newId, setAttribute } from './dom';
import type { Translate } from './words';
import { counted, recovered } from './words';

/** Maximum number of recoveries shown. Older ones are only counted. */
const MAX_RECOVERIES = 3;

/** Recoveries and findings of a run: a list, and a badge with their number that opens it. */
export class Notes {
  readonly badge: HTMLButtonElement;
  readonly root: HTMLElement;
  private shown = '';

  constructor(private readonly translate: Translate) {
    const id = newId('notes');
    this.root = make('ul', 'notes', { id, 'aria-label': translate('Findings') });
    this.root.hidden = true;
    this.badge = make('button', 'badge', { type: 'button', 'aria-controls': id });
    this.badge.hidden = true;
    this.badge.addEventListener('click', () => this.open(this.root.hidden));
    this.open(false);
  }

  draw(state: IRunState | null): void {
    const findings = state?.findings ?? [];
    const recoveries = state?.heals ?? [];
    const content = JSON.stringify([recoveries, findings]);
    if (content === this.shown) {
      return;
    }
    this.shown = content;
    const lines = [
      ...this.recovered(recoveries),
      ...findings.map(finding => this.finding(finding))
    ];
    this.root.replaceChildren(...lines);
    this.drawBadge(findings.filter(({ warning }) => warning).length, lines.length);
  }

  /** Show the number of warnings. Show the number of all lines if there are no warnings. */
  private drawBadge(warnings: number, all: number): void {
    const [symbol, text] =
      warnings > 0
        ? ['▲', counted(warnings, this.translate('{0} warning'), this.translate('{0} warnings'))]
        : ['i', counted(all, this.translate('{0} note'), this.translate('{0} notes'))];
    const sign = make('span', 'sign', { 'aria-hidden': 'true' }, symbol);
    this.badge.hidden = all === 0;
    setAttribute(this.badge, 'data-kind', warnings > 0 ? 'warning' : 'note');
    this.badge.replaceChildren(sign, text);
    if (all === 0) {
      this.open(false);
    }
  }

  private open(isOpen: boolean): void {
    this.root.hidden = !isOpen;
    setAttribute(this.badge, 'aria-expanded', String(isOpen));
    setAttribute(
      this.badge,
      'title',
      this.translate(isOpen ? 'Hide the list below the charts' : 'Show the list below the charts')
    );
    if (isOpen) {
      this.root.scrollIntoView({ block: 'nearest' });
    }
  }

  private recovered(recoveries: readonly IRecoveryRecord[]): HTMLElement[] {
    const texts = recoveries
      .slice(-MAX_RECOVERIES)
      .map(recovery => recovered(recovery, this.translate));
    const before = recoveries.length - texts.length;
    const [once, often] = [
      this.translate('recovered once before'),
      this.translate('recovered {0} times before')
    ];
    const all = before > 0 ? [counted(before, once, often), ...texts] : texts;
    return all.map(text => this.line('✚', text, 'recovery'));
  }

  private finding({ text, warning }: IFinding): HTMLElement {
    return warning ? this.line('▲', text, 'warning') : this.line('i', text, 'note');
  }

  private line(symbol: string, text: string, kind: 'recovery' | 'note' | 'warning'): HTMLElement {
    const sign = make('span', 'sign', { 'aria-hidden': 'true' }, symbol);
    const word = make(
      'span',
      'hidden',
      {},
      this.translate(kind === 'warning' ? 'warning:' : 'note:') + ' '
    );
    const words = make('span', '', {}, word, ...withCode(text));
    const line = make('li', 'finding', {}, sign, words);
    line.dataset['kind'] = kind;
    return line;
  }
}

/** Format text between backquotes as code. */
function withCode(text: string): (Node | string)[] {
  return text
    .split('`')
    .map((part, i) => (i % 2 === 1 ? make('code', '', {}, part) : part))
    .filter(part => part !== '');
}
