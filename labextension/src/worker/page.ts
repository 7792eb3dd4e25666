import { Cursor } from '../run/chart';
import { ChartGrid } from '../run/chartgrid';
import { Disposables, make, setAttribute, setText } from '../run/dom';
import { Frames } from '../run/frames';
import { Layout } from '../run/layout';
import type { RunModel } from '../run/model';
import { shareSources, stepTimeSources } from '../run/sources';
import type { ILook } from '../run/status';
import { isOpen, rankLook } from '../run/status';
import { Tabs } from '../run/tabs';
import { Theme } from '../run/theme';
import type { Translate } from '../run/words';
import { fill } from '../run/words';
import type { WorkerFeed } from './feed';
import { Log } from './log';
import { sourcesOf } from './ranksource';
import { Stack } from './stack';
import { systemSources } from './system';
import { Timings } from './timings';

/** Interval between two updates. */
const DRAW_MS = 250;

/** One tab of the page. */
interface ITabContent {
  readonly key: string;
  readonly title: string;
  readonly parts: readonly HTMLElement[];
  /** Draw the content. Called only while the tab is selected. */
  draw?(): void;
  /** Called when the user selects the tab. */
  appear?(): void;
}

/** Run of the worker: its data, and the stack of the worker. */
export interface IShownRun {
  readonly model: RunModel;
  readonly feed: WorkerFeed;
}

/** Head of the page. */
export interface IHead {
  readonly look: ILook;
  readonly place: string;
  /** Error of the worker. Empty without an error. */
  readonly error: string;
}

/** Return the head for a worker of a run. Null before its state arrives. */
export function headOf({ state }: RunModel, rank: number): IHead | null {
  const worker = state?.workers.find(one => one.rank === rank);
  if (state === null || worker === undefined) {
    return null;
  }
  const place = `${worker.host} · pid ${worker.pid} · ${worker.devices}`;
  return { look: rankLook(worker.status, state.status), place, error: worker.said };
}

/** Page of one worker: its log, and its stack, times of steps and use of the host in a run. */
export class WorkerPage {
  private readonly disposables = new Disposables();
  /** Keys are handled here only: JupyterLab binds commands to arrows and Enter. */
  private readonly root = make('div', 'run', { 'data-lm-suppress-shortcuts': 'true' });
  private readonly pill = make('span', 'pill');
  private readonly place = make('span', '');
  private readonly back: HTMLButtonElement;
  private readonly error = make('pre', 'log', { role: 'alert' });
  private readonly theme: Theme;
  private readonly log: Log;
  private readonly tabs: Tabs;
  private readonly frames: Frames;
  private contents: readonly ITabContent[];
  private shown = new Disposables();
  private timer = 0;

  /**
   * @param feed text of the worker.
   * @param head returns the head of the page. Null while it is unknown.
   */
  constructor(
    host: HTMLElement,
    private readonly rank: number,
    private readonly feed: WorkerFeed,
    private readonly head: () => IHead | null,
    openRun: () => void,
    private readonly translate: Translate
  ) {
    host.append(this.root);
    this.theme = new Theme(this.root);
    this.log = new Log(translate);
    this.contents = this.build(null);
    this.tabs = new Tabs(this.contents, translate('Worker'), () => this.choose());
    this.back = make('button', 'small', { type: 'button' }, translate('Open the run'));
    this.back.hidden = true;
    const name = make('span', 'heading', {}, fill(translate('Worker {0}'), rank));
    const line = make('div', 'line', {}, name, this.pill, this.place, this.back);
    this.root.append(line, this.error, this.tabs.root, this.tabs.panel);
    this.disposables.listen(this.back, 'click', openRun);
    this.frames = new Frames(
      this.root,
      () => this.draw(),
      () => this.theme.readAgain()
    );
    for (const part of [this.theme, this.log, this.frames]) {
      this.disposables.add(() => part.dispose());
    }
    this.disposables.add(() => clearTimeout(this.timer));
    this.disposables.add(() => this.shown.dispose());
    this.disposables.add(feed.subscribe(() => this.later()));
    this.disposables.add(this.theme.onChange(() => this.frames.request()));
    this.choose();
  }

  dispose(): void {
    this.disposables.dispose();
    this.root.remove();
  }

  /** Show the stack, times and use of the host of this run in place of another one. */
  show(run: IShownRun | null): void {
    this.shown.dispose();
    this.shown = new Disposables();
    this.contents = this.build(run);
    this.back.hidden = run === null;
    if (run !== null) {
      this.shown.add(run.model.subscribe(() => this.later()));
      this.shown.add(run.feed.subscribe(() => this.later()));
    }
    this.choose();
  }

  /** Draw after a short time, so that many messages need one drawing. */
  later(): void {
    if (this.timer === 0) {
      this.timer = window.setTimeout(() => {
        this.timer = 0;
        this.frames.request();
      }, DRAW_MS);
    }
  }

  private build(run: IShownRun | null): readonly ITabContent[] {
    const { translate, log, feed } = this;
    const draw = (): void => log.draw(feed.text);
    const title = translate('Log');
    const first = { key: 'log', title, parts: [log.root], draw, appear: () => log.follow() };
    return [first, this.stackOf(run), this.timingsOf(run), this.systemOf(run)];
  }

  private stackOf(run: IShownRun | null): ITabContent {
    const { translate } = this;
    const [key, title] = ['stack', translate('Stack')];
    if (run === null) {
      const none = translate('No stack: the worker runs no cell.');
      return { key, title, parts: [make('p', 'empty', {}, none)] };
    }
    const { model, feed } = run;
    const stack = new Stack(
      () => feed.requestStack(),
      () => this.later(),
      translate
    );
    this.shown.add(() => stack.dispose());
    const draw = (): void => {
      const worker = model.state?.workers.find(one => one.rank === this.rank);
      if (model.state !== null && worker !== undefined) {
        const isRunning = worker.status === 'running' && isOpen(model.state.status);
        stack.draw(feed.stack, worker, isRunning && model.connection !== 'gone');
      }
    };
    return { key, title, parts: [stack.root], draw, appear: () => stack.ask() };
  }

  private timingsOf(run: IShownRun | null): ITabContent {
    const { translate, rank } = this;
    const [key, title, none] = ['timings', translate('Timings'), translate('No steps yet.')];
    if (run === null) {
      return { key, title, parts: [make('p', 'empty', {}, none)] };
    }
    const { model } = run;
    const timings = new Timings(model, rank, translate);
    const steps = this.gridOf(model);
    const draw = (): void => {
      timings.draw();
      steps.show(sourcesOf(rank, [...stepTimeSources(model), ...shareSources(model)]), none);
      steps.draw(true);
    };
    return { key, title, parts: [timings.root, steps.root], draw };
  }

  private systemOf(run: IShownRun | null): ITabContent {
    const { translate, rank } = this;
    const [key, title] = ['system', translate('System')];
    const none = translate('No samples of the hosts: they are taken every 2 seconds.');
    if (run === null) {
      return { key, title, parts: [make('p', 'empty', {}, none)] };
    }
    const system = this.gridOf(run.model);
    const draw = (): void => {
      system.show(sourcesOf(rank, systemSources(run.model)), none);
      system.draw(true);
    };
    return { key, title, parts: [system.root], draw };
  }

  private gridOf(model: RunModel): ChartGrid {
    const grid = new ChartGrid({
      layout: new Layout(null),
      cursor: new Cursor(),
      theme: this.theme,
      translate: this.translate,
      hidden: new Set(),
      stragglers: () => [],
      recoveries: () => model.state?.heals ?? [],
      request: () => this.frames.request(),
      requestAll: () => this.frames.request()
    });
    this.shown.add(() => grid.dispose());
    return grid;
  }

  private choose(): void {
    const content = this.contents[this.tabs.chosen]!;
    this.tabs.panel.replaceChildren(...content.parts);
    this.draw();
    content.appear?.();
    this.frames.request();
  }

  private draw(): void {
    const head = this.head();
    if (head !== null) {
      setText(this.pill, `${head.look.sign} ${this.translate(head.look.word)}`);
      setAttribute(this.pill, 'data-tone', head.look.tone);
      setText(this.place, head.place);
      setText(this.error, head.error);
    }
    this.pill.hidden = head === null;
    this.error.hidden = head === null || head.error === '';
    this.contents[this.tabs.chosen]!.draw?.();
  }
}
