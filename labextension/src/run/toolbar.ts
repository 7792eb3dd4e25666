import { Disposables, make, newId, setText } from './dom';
import type { Layout } from './layout';
import type { ISettings } from './picture';
import type { Translate } from './words';

/** Weight of new values at the end of the slider. */
const LEAST_NEW = 1e-3;
const SLIDER_STEPS = 60;

/** Settings of all charts of the view: axis, smoothing, and a filter by name. */
export class Toolbar {
  readonly root: HTMLElement;
  private readonly disposables = new Disposables();
  private readonly axisChoice: HTMLElement;
  private readonly search: HTMLInputElement;
  private readonly searchLabel: HTMLElement;

  constructor(
    private readonly layout: Layout,
    private readonly translate: Translate,
    private readonly changed: () => void
  ) {
    const placeholder = translate('Metric name');
    this.search = make('input', 'search', { type: 'search', placeholder, spellcheck: 'false' });
    this.searchLabel = make('label', 'field nbdist-filter', {}, translate('Filter'), this.search);
    this.disposables.listen(this.search, 'input', changed);
    this.axisChoice = this.axis();
    this.root = make(
      'div',
      'toolbar',
      { role: 'group', 'aria-label': translate('Charts') },
      this.axisChoice,
      this.smoothing(),
      this.searchLabel
    );
  }

  /** Return true if a metric's name contains the text of the filter. */
  matches(name: string): boolean {
    const isHidden = this.searchLabel.hidden;
    return isHidden || name.toLowerCase().includes(this.search.value.trim().toLowerCase());
  }

  set hasAxis(isThere: boolean) {
    this.axisChoice.hidden = !isThere;
  }

  set hasFilter(isThere: boolean) {
    this.searchLabel.hidden = !isThere;
  }

  dispose(): void {
    this.disposables.dispose();
  }

  private axis(): HTMLElement {
    const name = newId('axis');
    const choice = (value: ISettings['x'], text: string): HTMLElement => {
      const input = make('input', '', { type: 'radio', name, value });
      input.checked = this.layout.x === value;
      this.disposables.listen(input, 'change', () => {
        this.layout.x = value;
        this.changed();
      });
      return make('label', 'choice', {}, input, make('span', '', {}, text));
    };
    const group = { role: 'radiogroup', 'aria-label': this.translate('Horizontal axis') };
    return make(
      'div',
      'choices',
      group,
      choice('place', this.translate('Step')),
      choice('time', this.translate('Time'))
    );
  }

  private smoothing(): HTMLElement {
    const before = positionOf(this.layout.smoothing);
    const range = { type: 'range', min: 0, max: SLIDER_STEPS, value: before };
    const input = make('input', 'slider', range);
    const value = make('output', 'slider-value', { 'aria-hidden': 'true' });
    const show = (): void => {
      const { smoothing } = this.layout;
      const text = smoothing === 0 ? '0' : smoothing.toFixed(smoothing > 0.99 ? 3 : 2);
      setText(value, text);
      input.setAttribute('aria-valuetext', text);
    };
    show();
    this.disposables.listen(input, 'input', () => {
      this.layout.smoothing = weightOf(Number(input.value));
      show();
      this.changed();
    });
    return make('label', 'field', {}, this.translate('Smoothing'), input, value);
  }
}

/**
 * Map the slider to a weight, finer towards 1: 0, 0.9 at a third, 0.99 at two thirds, 0.999 at the
 * end.
 */
function weightOf(position: number): number {
  return 1 - LEAST_NEW ** (position / SLIDER_STEPS);
}

/** Return the position of the slider for a weight. */
function positionOf(weight: number): number {
  return Math.round((SLIDER_STEPS * Math.log(1 - weight)) / Math.log(LEAST_NEW));
}
