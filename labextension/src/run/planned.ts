import type { IPlanCheck, IRunState, IStepFigures } from '../records';
import { make } from './dom';
import type { Translate, Unit } from './words';
import { amount, fill } from './words';

/** Compared figures: key, unit and label. */
const ROWS: readonly (readonly [keyof IStepFigures, Unit, string])[] = [
  ['step_s', 'seconds', 'step time'],
  ['collectives', 'share', 'in collectives'],
  ['arguments', 'bytes', 'arguments per device'],
  ['memory', 'bytes', 'memory per device']
];

/** Planned figures of a step next to the measured ones. */
export class Planned {
  readonly root = make('div', 'planned');
  private shown = '';

  constructor(private readonly translate: Translate) {}

  draw(state: IRunState | null): void {
    const plan = state?.plan ?? null; // runs of older versions have no plan
    const content = JSON.stringify(plan);
    if (content === this.shown) {
      return;
    }
    this.shown = content;
    this.root.hidden = plan === null;
    this.root.replaceChildren(...(plan === null ? [] : [this.table(plan)]));
  }

  private table({ title, planned, measured }: IPlanCheck): HTMLElement {
    const head = make('tr', '', {}, this.cell('th', fill(this.translate('Plan: {0}'), title)));
    head.append(...ROWS.map(([, , name]) => this.cell('th', this.translate(name), 'col')));
    const rows: readonly (readonly [string, IStepFigures])[] = [
      [this.translate('planned'), planned],
      [this.translate('measured'), measured]
    ];
    const body = rows.map(([name, figures]) => this.row(name, figures));
    const label = { 'aria-label': this.translate('Planned and measured') };
    return make('table', '', label, make('thead', '', {}, head), make('tbody', '', {}, ...body));
  }

  private row(name: string, figures: IStepFigures): HTMLElement {
    const cells = ROWS.map(([key, unit]) => {
      const value = figures[key];
      return this.cell('td', value === null ? '–' : amount(value, unit));
    });
    return make('tr', '', {}, this.cell('th', name, 'row'), ...cells);
  }

  private cell(tag: 'td' | 'th', text: string, scope?: 'col' | 'row'): HTMLElement {
    return make(tag, '', { scope }, make('bdi', '', {}, text));
  }
}
