import type { IRunState } from '../records';
import { Disposables, make, setAttribute, setText } from './dom';
import type { IFigures } from './figures';
import { figures } from './figures';
import type { Connection, RunModel } from './model';
import { RECOVERING, canStop, isOpen, RUN_LOOKS, stopWords } from './status';
import type { Translate } from './words';
import { amount, count, counted, duration, fill, plain, refusal } from './words';

const CONNECTIONS: Readonly<Partial<Record<Connection, string>>> = {
  connecting: 'connecting …',
  reconnecting: 'connection lost, reconnecting …',
  gone: 'the run was deleted: this view keeps the data received so far'
};

interface IFigure {
  readonly root: HTMLElement;
  readonly name: HTMLElement;
  readonly value: HTMLElement;
}

/** The button offers to cancel the step after this time: a step may never end. */
const CANCEL_AFTER_S = 3;

/** Text in place of the button, for a program that is no job. */
const STOP_ELSEWHERE = 'Stop the program where it was started.';
/** Tooltip of the disabled button. */
const NOT_CONNECTED = 'Not connected to the run';
/** Texts of the button if the run does not stop. */
const CANCEL_STEP = {
  word: 'Cancel step',
  how: 'Cancel the current step: its variables may be lost'
};

/** Status, progress and figures of the run, and the button that stops it. */
export class Header {
  readonly root: HTMLElement;
  private readonly disposables = new Disposables();
  private readonly pill = make('span', 'pill');
  private readonly sign = make('span', 'sign', { 'aria-hidden': 'true' });
  private readonly word = make('span', '');
  private readonly title = make('strong', 'title');
  private readonly about = make('span', 'about');
  private readonly connection = make('span', 'connection');
  private readonly stop: HTMLButtonElement;
  private readonly elsewhere = make('span', 'elsewhere');
  private stoppingSince: number | null = null;
  private canCancel = false;
  private readonly bar: HTMLElement;
  private readonly done = make('span', 'done');
  private readonly figures = new Map<string, IFigure>();
  private readonly numbers = make('dl', 'figures');
  private readonly spoken = make('span', 'hidden', { role: 'status' });
  private isAsked = false;

  constructor(
    private readonly model: RunModel,
    private readonly translate: Translate,
    stop: () => Promise<boolean>,
    badge: HTMLElement
  ) {
    this.stop = make('button', 'stop', { type: 'button' }, translate('Stop run'));
    const range = {
      'aria-valuemin': 0,
      'aria-valuemax': 100,
      'aria-label': translate('completed steps')
    };
    this.bar = make('div', 'bar', { role: 'progressbar', ...range }, this.done);
    this.pill.append(this.sign, this.word);
    const line = [this.pill, this.title, this.about, this.connection, badge, this.elsewhere];
    this.root = make(
      'div',
      'header',
      {},
      make('div', 'line', {}, ...line, this.stop),
      this.bar,
      this.numbers,
      this.spoken
    );
    this.disposables.listen(this.stop, 'click', () => void this.ask(stop));
  }

  /**
   * Args:
   *   now: seconds since 1970.
   */
  draw(now: number): void {
    const { state, connection, reason } = this.model;
    const words = CONNECTIONS[connection];
    const recovering = state !== null && isOpen(state.status) ? state.healing : '';
    const [lost] = recovering.split('\n', 1);
    const usual = words === undefined ? lost! : this.translate(words);
    const isRefused = connection === 'unreadable';
    setText(this.connection, isRefused ? refusal(reason, this.translate) : usual);
    setAttribute(this.connection, 'title', recovering);
    this.isAsked &&= connection === 'live';
    if (state !== null) {
      this.stoppingSince = state.status === 'stopping' ? (this.stoppingSince ?? now) : null;
      this.canCancel = this.stoppingSince !== null && now - this.stoppingSince > CANCEL_AFTER_S;
      this.canCancel &&= state.program === ''; // a program saves a checkpoint, and then ends
      this.drawState(state);
    }
    const known = figures(this.model, now);
    this.drawBar(known);
    this.drawNumbers(known);
  }

  dispose(): void {
    this.disposables.dispose();
  }

  private async ask(stop: () => Promise<boolean>): Promise<void> {
    const { state, connection } = this.model;
    if (state === null || connection !== 'live') {
      return;
    }
    if (this.canCancel) {
      this.stoppingSince = null; // a further click does not send it again at once
      await stop();
    } else if (!this.isAsked && state.status === 'running') {
      this.isAsked = true;
      this.drawState(state);
      this.isAsked = (await stop()) && this.isAsked;
    }
  }

  private drawState(state: IRunState): void {
    const isStopping = this.isAsked && state.status === 'running';
    const isRecovering = state.healing !== '' && state.status === 'running' && !isStopping;
    const look = RUN_LOOKS[isStopping ? 'stopping' : state.status];
    const { sign, word, tone } = isRecovering ? RECOVERING : look;
    setText(this.sign, sign);
    setText(this.word, this.translate(word));
    const text = isRecovering ? `${this.translate(word)}: ${state.healing}` : this.translate(word);
    setText(this.spoken, fill(this.translate('{0}: {1}'), nameOf(state, this.translate), text));
    setAttribute(this.pill, 'data-tone', tone);
    setText(this.title, nameOf(state, this.translate));
    setAttribute(this.title, 'title', `${state.header}\n${state.id}`);
    setText(this.about, aboutOf(state, this.translate));
    this.drawStop(state, isStopping);
  }

  /** Update the button. It remains visible and focusable while the run stops. */
  private drawStop(state: IRunState, isStopping: boolean): void {
    const isBusy = (isStopping || state.status === 'stopping') && !this.canCancel;
    this.stop.hidden = !canStop(state) || this.model.connection === 'saved';
    setAttribute(this.stop, 'aria-disabled', String(isBusy || this.model.connection !== 'live'));
    const isElsewhere = isOpen(state.status) && !canStop(state);
    setText(this.elsewhere, isElsewhere ? this.translate(STOP_ELSEWHERE) : '');
    const { word, how } = this.canCancel ? CANCEL_STEP : stopWords(state);
    const isCut = this.model.connection !== 'live';
    const title = isBusy ? stopWords(state).stopping : isCut ? NOT_CONNECTED : how;
    setText(this.stop, this.translate(isBusy ? 'Stopping …' : word));
    setAttribute(this.stop, 'title', this.translate(title));
  }

  private drawBar({ step, steps }: IFigures): void {
    const part = Math.min(1, step / steps);
    const isKnown = !Number.isNaN(part);
    this.bar.style.visibility = isKnown ? '' : 'hidden'; // what is below does not move
    if (isKnown) {
      this.done.style.inlineSize = `${(100 * part).toFixed(1)}%`;
      setAttribute(this.bar, 'aria-valuenow', (100 * part).toFixed(0));
      const words = fill(this.translate('step {0} of {1}'), count(step), count(steps));
      setAttribute(this.bar, 'aria-valuetext', words);
    }
  }

  private drawNumbers(known: IFigures): void {
    const of = (part: number, whole: number): string =>
      Number.isNaN(whole)
        ? count(part)
        : fill(this.translate('{0} of {1}'), count(part), count(whole));
    this.number('epoch', this.translate('epoch'), known.epoch, part => of(part, known.epochs));
    this.number('step', this.translate('step'), known.step, part => of(part, known.steps));
    this.number(
      'metric',
      definedAs(known, this.translate),
      known.name === '' ? NaN : known.value,
      plain,
      known.name !== ''
    );
    const time = this.translate(this.model.timesReports ? 'between reports' : 'step time');
    this.number('time', time, known.stepSeconds, value => amount(value, 'seconds'));
    const { name } = this.figures.get('time')!;
    setAttribute(name, 'title', this.translate('Mean of the last steps or reports'));
    this.number('rate', this.translate('samples/s'), known.samplesPerSecond, plain);
    this.number('elapsed', this.translate('elapsed'), known.elapsed, duration);
    this.number('left', this.translate('remaining'), known.left, duration);
  }

  private number(
    key: string,
    name: string,
    value: number,
    write: (value: number) => string,
    isThere = !Number.isNaN(value)
  ): void {
    let figure = this.figures.get(key);
    if (figure === undefined) {
      figure = { root: make('div', 'figure'), name: make('dt', ''), value: make('bdi', '') };
      figure.root.append(figure.name, make('dd', '', {}, figure.value));
      this.numbers.append(figure.root);
      this.figures.set(key, figure);
    }
    figure.root.hidden = !isThere;
    setText(figure.name, name);
    setText(figure.value, isThere ? write(value) : '');
  }
}

/** Return name and definition of the shown metric: `loss (last step)`. */
export function definedAs({ name, definition }: IFigures, translate: Translate): string {
  return definition === '' ? name : `${name} (${translate(definition)})`;
}

/** Return the name of a run. Runs of older versions have none. */
export function nameOf({ name, label }: IRunState, translate: Translate): string {
  return name === '' ? fill(translate('Cell {0}'), label) : name;
}

function aboutOf(state: IRunState, translate: Translate): string {
  const who = counted(state.workers.length, translate('{0} worker'), translate('{0} workers'));
  const batch = state.batch > 0 ? fill(translate('batch {0}'), count(state.batch)) : '';
  return [who, state.framework, state.strategy ?? '', batch]
    .filter(part => part !== '')
    .join(' · ');
}
