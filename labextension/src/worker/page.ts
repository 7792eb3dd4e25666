import type { IRunWorker } from '../records';
import { Cursor } from '../run/chart';
import { ChartGrid } from '../run/chartgrid';
import { Disposables, make, setAttribute, setText } from '../run/dom';
import { Frames } from '../run/frames';
import { Layout } from '../run/layout';
import type { RunModel } from '../run/model';
import { shareSources, stepTimeSources } from '../run/sources';
import { isOpen, RANK_LOOKS, RANK_UNKNOWN } from '../run/status';
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
  draw(worker: IRunWorker): void;
  /** Called when the user selects the tab. */
  appear?(): void;
}

/** Page of one worker of a run: its log, its stack, its step times and its use of the host. */
export class WorkerPage {
  private readonly disposables = new Disposables();
  /** Keys are handled here only: JupyterLab binds commands to arrows and Enter. */
  private readonly root = make('div', 'run', { 'data-lm-suppress-shortcuts': 'true' });
  private readonly pill = make('span', 'pill');
  private readonly place = make('span', '');
  private readonly error = make('pre', 'log', { role: 'alert' });
  private readonly contents: readonly ITabContent[];
  private readonly tabs: Tabs;
  private readonly frames: Frames;
  private timer = 0;

  constructor(
    host: HTMLElement,
    private readonly model: RunModel,
    private readonly feed: WorkerFeed,
    private readonly rank: number,
    openRun: () => void,
    private readonly translate: Translate
  ) {
    host.append(this.root);
    const theme = new Theme(this.root);
    this.contents = this.build(theme);
    this.tabs = new Tabs(this.contents, translate('Worker'), () => this.choose());
    const back = make('button', 'small', { type: 'button' }, translate('Open the run'));
    const name = make('span', 'heading', {}, fill(translate('Worker {0}'), rank));
    const line = make('div', 'line', {}, name, this.pill, this.place, back);
    this.root.append(line, this.error, this.tabs.root, this.tabs.panel);
    this.disposables.listen(back, 'click', openRun);
    this.frames = new Frames(
      this.root,
      () => this.draw(),
      () => theme.readAgain()
    );
    this.disposables.add(() => theme.dispose());
    this.disposables.add(() => this.frames.dispose());
    this.disposables.add(() => clearTimeout(this.timer));
    this.disposables.add(model.subscribe(() => this.later()));
    this.disposables.add(feed.subscribe(() => this.later()));
    this.disposables.add(theme.onChange(() => this.frames.request()));
    this.choose();
  }

  dispose(): void {
    this.disposables.dispose();
    this.root.remove();
  }

  private build(theme: Theme): readonly ITabContent[] {
    const { translate, model, feed, rank } = this;
    const log = new Log(translate);
    const stack = new Stack(
      () => feed.requestStack(),
      () => this.later(),
      translate
    );
    const timings = new Timings(model, rank, translate);
    const noSteps = translate('No steps yet.');
    const noSamples = translate('No samples of the hosts: they are taken every 2 seconds.');
    const steps = this.gridOf(theme);
    const system = this.gridOf(theme);
    for (const part of [log, stack, steps, system]) {
      this.disposables.add(() => part.dispose());
    }
    return [
      {
        key: 'log',
        title: translate('Log'),
        parts: [log.root],
        draw: () => log.draw(feed.text),
        appear: () => log.follow()
      },
      {
        key: 'stack',
        title: translate('Stack'),
        parts: [stack.root],
        draw: worker => stack.draw(feed.stack, worker, this.isRunning(worker)),
        appear: () => stack.ask()
      },
      {
        key: 'timings',
        title: translate('Timings'),
        parts: [timings.root, steps.root],
        draw: () => {
          timings.draw();
          steps.show(sourcesOf(rank, [...stepTimeSources(model), ...shareSources(model)]), noSteps);
          steps.draw(true);
        }
      },
      {
        key: 'system',
        title: translate('System'),
        parts: [system.root],
        draw: () => {
          system.show(sourcesOf(rank, systemSources(model)), noSamples);
          system.draw(true);
        }
      }
    ];
  }

  private gridOf(theme: Theme): ChartGrid {
    return new ChartGrid({
      layout: new Layout(null),
      cursor: new Cursor(),
      theme,
      translate: this.translate,
      hidden: new Set(),
      stragglers: () => [],
      recoveries: () => this.model.state?.heals ?? [],
      request: () => this.frames.request(),
      requestAll: () => this.frames.request()
    });
  }

  private choose(): void {
    const content = this.contents[this.tabs.chosen]!;
    this.tabs.panel.replaceChildren(...content.parts);
    this.draw();
    content.appear?.();
    this.frames.request();
  }

  /** Draw after a short time, so that many messages need one drawing. */
  private later(): void {
    if (this.timer === 0) {
      this.timer = window.setTimeout(() => {
        this.timer = 0;
        this.frames.request();
      }, DRAW_MS);
    }
  }

  private draw(): void {
    const worker = this.model.state?.workers.find(one => one.rank === this.rank);
    if (worker === undefined) {
      return;
    }
    const isLost = this.model.state?.status === 'lost' && worker.status === 'running';
    const { sign, word, tone } = isLost ? RANK_UNKNOWN : RANK_LOOKS[worker.status];
    setText(this.pill, `${sign} ${this.translate(word)}`);
    setAttribute(this.pill, 'data-tone', tone);
    setText(this.place, `${worker.host} · pid ${worker.pid} · ${worker.devices}`);
    setText(this.error, worker.said);
    this.error.hidden = worker.said === '';
    this.contents[this.tabs.chosen]!.draw(worker);
  }

  private isRunning({ status }: IRunWorker): boolean {
    return status === 'running' && this.model.state !== null && isOpen(this.model.state.status);
  }
}
