import type { IRunWorker, IWorkerStack } from '../records';
import { Disposables, make, setText } from '../run/dom';
import type { Translate } from '../run/words';
import { count, fill } from '../run/words';

/** A worker that does not answer for this long runs native code that holds the interpreter. */
const ANSWER_MS = 5000;

/** Stack of a worker, requested when it appears and by a button. */
export class Stack {
  readonly root: HTMLElement;
  private readonly disposables = new Disposables();
  private readonly button: HTMLButtonElement;
  private readonly status = make('span', 'faint', { role: 'status' });
  private readonly place = make('p', '');
  private readonly calls: HTMLElement;
  private readonly threads: HTMLElement;
  private readonly all: HTMLElement;
  private requestedAt = 0;
  private timer = 0;
  private shownAt = 0;

  constructor(
    private readonly request: () => boolean,
    private readonly changed: () => void,
    private readonly translate: Translate
  ) {
    this.button = make('button', 'small', { type: 'button' }, translate('Read the stack now'));
    const pre = (label: string): HTMLElement =>
      make('pre', 'log', { tabindex: 0, role: 'group', 'aria-label': label });
    this.calls = pre(translate('Stack of the main thread'));
    this.threads = pre(translate('Stacks of all threads'));
    const summary = make('summary', '', {}, translate('All threads'));
    this.all = make('details', '', {}, summary, this.threads);
    const bar = make('div', 'toolbar', {}, this.button, this.status);
    this.root = make('div', 'worker-stack', {}, bar, this.place, this.calls, this.all);
    this.disposables.listen(this.button, 'click', () => this.ask());
  }

  /** Request the stack, and show a hint if there is no answer in time. */
  ask(): void {
    if (!this.button.disabled && this.request()) {
      this.requestedAt = Date.now();
      clearTimeout(this.timer);
      this.timer = window.setTimeout(this.changed, ANSWER_MS + 1);
      this.changed();
    }
  }

  draw(stack: IWorkerStack | null, worker: IRunWorker, isRunning: boolean): void {
    this.button.disabled = !isRunning;
    if (stack !== null && stack.at !== this.shownAt) {
      this.shownAt = stack.at;
      this.requestedAt = 0;
      this.show(stack);
    }
    this.place.hidden = this.calls.hidden = stack === null;
    this.all.hidden = stack === null || stack.threads === '';
    setText(this.status, this.statusOf(stack, worker, isRunning));
  }

  dispose(): void {
    clearTimeout(this.timer);
    this.disposables.dispose();
  }

  private show(stack: IWorkerStack): void {
    const { translate } = this;
    const time = new Date(1000 * stack.at).toLocaleTimeString();
    const parts = [
      time,
      stack.step > 0 ? fill(translate('step {0}'), count(stack.step)) : '',
      stack.place,
      stack.waits ? translate('waits for another thread, usually one in a collective') : ''
    ];
    setText(this.place, parts.filter(part => part !== '').join(' · '));
    const none = translate(
      'No line of a cell is on the stack: the worker runs compiled steps, or waits for data.'
    );
    setText(this.calls, stack.stack === '' ? none : stack.stack);
    setText(this.threads, stack.threads);
  }

  private statusOf(
    stack: IWorkerStack | null,
    { host, pid }: IRunWorker,
    isRunning: boolean
  ): string {
    const { translate } = this;
    if (!isRunning) {
      const none = translate('The worker does not run this cell any more. No stack was stored.');
      return stack === null ? none : translate('The last stack before the end:');
    }
    if (this.requestedAt > 0 && Date.now() - this.requestedAt > ANSWER_MS) {
      const hint =
        'No answer: native code holds the interpreter. On {0}, run py-spy dump --pid {1}';
      return fill(translate(hint), host, pid);
    }
    return this.requestedAt > 0 ? translate('Waiting for the worker…') : '';
  }
}
