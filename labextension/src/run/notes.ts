import type { IFinding, IRecoveryRecord, IRunState } from '../records';
import { make } from './dom';
import type { Translate } from './words';
import { counted, recovered } from './words';

/** Maximum number of recoveries shown. Older ones are only counted. */
const MAX_RECOVERIES = 3;

/** Recoveries, findings and the error of a run. */
export class Notes {
  readonly root = make('div', 'notes');
  private shown = '';

  constructor(private readonly translate: Translate) {}

  draw(state: IRunState | null): void {
    const findings = state?.findings ?? [];
    const recoveries = state?.heals ?? [];
    const error = state?.error ?? '';
    const content = JSON.stringify([recoveries, findings, error]);
    if (content === this.shown) {
      return;
    }
    this.shown = content;
    const parts: HTMLElement[] = error === '' ? [] : [this.failure(error)];
    const lines = [
      ...this.recovered(recoveries),
      ...findings.map(finding => this.finding(finding))
    ];
    if (lines.length > 0) {
      const name = this.translate('Findings');
      parts.push(make('ul', 'findings', { 'aria-label': name }, ...lines));
    }
    this.root.replaceChildren(...parts);
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

  private failure(error: string): HTMLElement {
    const name = this.translate('Error of the run');
    return make('pre', 'error', { role: 'group', 'aria-label': name, tabindex: 0 }, error);
  }
}

/** Format text between backquotes as code. */
function withCode(text: string): (Node | string)[] {
  return text
    .split('`')
    .map((part, i) => (i % 2 === 1 ? make('code', '', {}, part) : part))
    .filter(part => part !== '');
}
