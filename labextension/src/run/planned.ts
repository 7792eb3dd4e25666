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

/** Definition of the measured step time. The one above the charts is a mean. */
const MEDIAN = 'Measured: the median of the last steps';

/** Reasons for a measurement that differs from the plan by more than this factor. */
const LARGE_FACTOR = 2;

const REASONS: readonly (readonly [keyof IStepFigures, string])[] = [
  [
    'step_s',
    'Measured step time / plan = {0}: the plan leaves out small operations and other processes, ' +
      'and takes rates from tables until %dist_devices --bench measures them.'
  ],
  [
    'collectives',
    'Measured share of collectives / plan = {0}: the plan takes the rates of links from tables ' +
      'until %dist_devices --bench measures them.'
  ],
  [
    'memory',
    'Measured memory / plan = {0}: XLA decides about temporaries, and %%dist_plan --verify ' +
      'asks it in advance.'
  ]
];

/** Explain the first figure that differs a lot from the plan. Empty if none does. */
export function explanation(
  { planned, measured }: Pick<IPlanCheck, 'planned' | 'measured'>,
  translate: Translate
): string {
  for (const [key, reason] of REASONS) {
    const [before, after] = [planned[key], measured[key]];
    const factor = before && after ? after / before : 1;
    if (factor > LARGE_FACTOR || factor < 1 / LARGE_FACTOR) {
      return fill(translate(reason), Number(factor.toPrecision(2)));
    }
  }
  return '';
}

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
    if (plan === null) {
      this.root.replaceChildren();
      return;
    }
    const why = explanation(plan, this.translate);
    this.root.replaceChildren(this.table(plan), ...(why === '' ? [] : [make('p', '', {}, why)]));
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
      const cell = this.cell('td', value === null ? '–' : amount(value, unit));
      cell.title = key === 'step_s' ? this.translate(MEDIAN) : '';
      return cell;
    });
    return make('tr', '', {}, this.cell('th', name, 'row'), ...cells);
  }

  private cell(tag: 'td' | 'th', text: string, scope?: 'col' | 'row'): HTMLElement {
    return make(tag, '', { scope }, make('bdi', '', {}, text));
  }
}
