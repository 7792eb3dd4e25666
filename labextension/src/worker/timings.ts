import { make } from '../run/dom';
import type { RunModel } from '../run/model';
import { BETWEEN_REPORTS } from '../run/model';
import type { Translate } from '../run/words';
import { amount } from '../run/words';

/** Number of steps or reports in the recent means. */
const RECENT = 20;

/** Parts of a step in the order of the table. */
const PARTS = [
  { name: 'step_s', words: 'whole step' },
  { name: 'input_s', words: 'waiting for a batch' },
  { name: 'collective_s', words: 'in collectives' }
] as const;

/**
 * Table with the recent times of a worker's step, beside those of the other workers. If nbdist times
 * no steps, it contains the time between reports.
 */
export class Timings {
  readonly root = make('table', 'timings');

  constructor(
    private readonly model: RunModel,
    private readonly rank: number,
    private readonly translate: Translate
  ) {}

  draw(): void {
    if (this.model.timesReports) {
      this.drawReports();
    } else {
      this.drawSteps();
    }
  }

  private drawSteps(): void {
    const known = PARTS.filter(({ name }) => this.mean(name, this.rank) >= 0);
    this.root.hidden = known.length === 0;
    const whole = this.mean('step_s', this.rank);
    const rows = known.map(({ name, words }) =>
      this.row(words, this.mean(name, this.rank), whole, this.medianOfAll(name))
    );
    if (known.length > 1) {
      rows.push(this.row('computing and other work', this.restOf(this.rank), whole, NaN));
    }
    this.show(['part of a step', 'mean of 20 steps', 'share', 'median of all workers'], rows);
  }

  private drawReports(): void {
    const mean = this.mean(BETWEEN_REPORTS, this.rank);
    const texts = [amount(mean, 'seconds'), write(this.medianOfAll(BETWEEN_REPORTS))];
    const cells = texts.map(text => make('td', 'number', {}, text));
    const head = make('th', '', { scope: 'row' }, this.translate('between reports'));
    this.root.hidden = Number.isNaN(mean);
    const names = ['time', 'mean of 20 reports', 'median of all workers'];
    this.show(names, [make('tr', '', {}, head, ...cells)]);
  }

  private show(names: readonly string[], rows: readonly HTMLElement[]): void {
    const heads = names.map((name, i) =>
      make('th', i > 0 ? 'number' : '', { scope: 'col' }, this.translate(name))
    );
    this.root.replaceChildren(
      make('thead', '', {}, make('tr', '', {}, ...heads)),
      make('tbody', '', {}, ...rows)
    );
  }

  private row(label: string, seconds: number, whole: number, median: number): HTMLElement {
    const head = make('th', '', { scope: 'row' }, this.translate(label));
    const texts = [amount(seconds, 'seconds'), amount(seconds / whole, 'share'), write(median)];
    return make('tr', '', {}, head, ...texts.map(text => make('td', 'number', {}, text)));
  }

  private restOf(rank: number): number {
    const parts = PARTS.slice(1).map(({ name }) => this.mean(name, rank) || 0);
    return Math.max(
      0,
      parts.reduce((left, part) => left - part, this.mean('step_s', rank))
    );
  }

  private mean(name: string, rank: number): number {
    return this.model.measure(name)?.own.get(rank)?.recent(RECENT) ?? NaN;
  }

  private medianOfAll(name: string): number {
    const ranks = [...(this.model.measure(name)?.own.keys() ?? [])];
    const means = ranks.map(rank => this.mean(name, rank)).filter(mean => mean >= 0);
    means.sort((a, b) => a - b);
    const middle = means.length >> 1;
    return means.length % 2 === 1
      ? means[middle]!
      : ((means[middle - 1] ?? NaN) + (means[middle] ?? NaN)) / 2;
  }
}

function write(seconds: number): string {
  return Number.isNaN(seconds) ? '–' : amount(seconds, 'seconds');
}
