import { Disposables, make, newId, setText } from './dom';
import type { ISettings } from './picture';
import type { Translate } from './words';

/** Weight of new values at the end of the slider. */
const LEAST_NEW = 1e-3;
const SLIDER_STEPS = 60;

/** Settings of all charts of the view: metric, axis, scale and smoothing. */
export class Toolbar {
  readonly root: HTMLElement;
  private readonly disposables = new Disposables();
  private readonly metric: HTMLSelectElement;
  private readonly metricLabel: HTMLElement;
  private keys = '';

  constructor(
    private readonly settings: ISettings,
    private readonly translate: Translate,
    private readonly changed: () => void
  ) {
    const id = newId('metric');
    this.metric = make('select', '', { id });
    this.metricLabel = make('label', 'field', { for: id }, translate('Metric'), this.metric);
    this.disposables.listen(this.metric, 'change', changed);
    this.root = make(
      'div',
      'toolbar',
      { role: 'group', 'aria-label': translate('Charts') },
      this.metricLabel,
      this.axis(),
      this.log(),
      this.smoothing()
    );
  }

  /** Key of the selected metric. */
  get chosen(): string {
    return this.metric.value;
  }

  /** Metrics are available. */
  set hasMetrics(isThere: boolean) {
    this.metricLabel.hidden = !isThere || this.metric.options.length < 2;
  }

  /** Set the selectable metrics. Keeps the selection. */
  offer(metrics: readonly { readonly key: string; readonly title: string }[]): void {
    const keys = metrics.map(({ key }) => key).join('|');
    if (keys !== this.keys) {
      this.keys = keys;
      const chosen = this.metric.value;
      const options = metrics.map(({ key, title }) => make('option', '', { value: key }, title));
      this.metric.replaceChildren(...options);
      const isThere = metrics.some(({ key }) => key === chosen);
      this.metric.value = isThere ? chosen : (metrics[0]?.key ?? '');
    }
  }

  dispose(): void {
    this.disposables.dispose();
  }

  private axis(): HTMLElement {
    const name = newId('axis');
    const choice = (value: ISettings['x'], text: string): HTMLElement => {
      const input = make('input', '', { type: 'radio', name, value });
      input.checked = this.settings.x === value;
      this.disposables.listen(input, 'change', () => {
        this.settings.x = value;
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

  private log(): HTMLElement {
    const input = make('input', '', { type: 'checkbox' });
    input.checked = this.settings.isLog;
    this.disposables.listen(input, 'change', () => {
      this.settings.isLog = input.checked;
      this.changed();
    });
    return make('label', 'field', {}, input, this.translate('Log scale'));
  }

  private smoothing(): HTMLElement {
    const input = make('input', 'slider', { type: 'range', min: 0, max: SLIDER_STEPS, value: 0 });
    const value = make('output', 'slider-value', { 'aria-hidden': 'true' }, '0');
    this.disposables.listen(input, 'input', () => {
      this.settings.smoothing = weightOf(Number(input.value));
      const text = this.settings.smoothing.toFixed(this.settings.smoothing > 0.99 ? 3 : 2);
      setText(value, text);
      input.setAttribute('aria-valuetext', text);
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
