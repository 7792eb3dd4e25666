import { Cursor } from './chart';
import { ChartGrid } from './chartgrid';
import { Disposables, make } from './dom';
import { Failure } from './failure';
import { Frames } from './frames';
import { Header } from './header';
import { Layout, pageStorage } from './layout';
import { MediaSection } from './media';
import type { LoadMedia } from './mediacard';
import type { RunModel } from './model';
import { Notes } from './notes';
import { Planned } from './planned';
import type { ISource } from './sources';
import {
  memorySources,
  metricSources,
  shareSources,
  stepTimeSources,
  throughputSources
} from './sources';
import { isOpen } from './status';
import { Tabs } from './tabs';
import { Theme } from './theme';
import { Toolbar } from './toolbar';
import { refusal } from './words';
import type { Translate } from './words';
import { systemSources } from '../worker/system';
import { stragglersOf, Workers } from './workers';

/** Minimum interval between updates of texts, tables and heat maps. */
const WORDS_MS = 250;
/** Minimum interval between updates of the worker table, because it may have many rows. */
const TABLE_MS = 1000;
/** Interval of the clock while a run is open. */
const CLOCK_MS = 1000;

/** Actions of the user on the run. */
export interface IRunActions {
  stop(): Promise<boolean>;
  /** Show the error in the output of its cell. Returns false if the page does not contain it. */
  showError?(): boolean;
  /** Open the page of a worker. Missing if the page has no room for it. */
  openWorker?(rank: number): void;
  /** Load a histogram, an image, a table or a text. Missing without a server. */
  readonly loadMedia?: LoadMedia;
}

interface IPage {
  readonly key: string;
  readonly title: string;
  readonly sources: (model: RunModel) => ISource[];
  /** Text while there is no data. */
  readonly empty: string;
  /** Text in its place if the run has ended. */
  readonly emptyAtEnd?: string;
}

function pagesIn(translate: Translate): readonly IPage[] {
  const noStep = translate('No steps yet.');
  return [
    {
      key: 'metrics',
      title: translate('Metrics'),
      sources: metricSources,
      empty: translate(
        'No metrics yet. Call `report(loss=…)` or make the loss the last line of a step.'
      ),
      emptyAtEnd: translate('The run reported no metrics.')
    },
    { key: 'time', title: translate('Step time'), sources: stepTimeSources, empty: noStep },
    { key: 'rate', title: translate('Throughput'), sources: throughputSources, empty: noStep },
    {
      key: 'memory',
      title: translate('Memory'),
      sources: memorySources,
      empty: translate('No memory measurements yet.')
    },
    {
      key: 'share',
      title: translate('Network & input'),
      sources: shareSources,
      empty: translate('No measurements yet.')
    },
    {
      key: 'system',
      title: translate('System'),
      sources: systemSources,
      empty: translate('No samples of the hosts: they are taken every 2 seconds.')
    }
  ];
}

/** View of a live or saved run: plain elements in `host`, drawn when the model changes. */
export class RunView {
  private readonly disposables = new Disposables();
  private readonly layout = new Layout(pageStorage());
  /** Keys are handled here only: JupyterLab binds commands to arrows and Enter. */
  private readonly root = make('div', 'run', { 'data-lm-suppress-shortcuts': 'true' });
  private readonly frames: Frames;
  private readonly pages: readonly IPage[];
  private readonly header: Header;
  private readonly notes: Notes;
  private readonly failure: Failure;
  private readonly planned: Planned;
  private readonly toolbar: Toolbar;
  private readonly media: MediaSection;
  private readonly tabs: Tabs;
  private readonly workers: Workers;
  private readonly charts: ChartGrid;
  private shownPage = '';
  private wordsDrawn = -Infinity;
  private tableDrawn = -Infinity;
  private timer = 0;

  constructor(
    host: HTMLElement,
    private readonly model: RunModel,
    actions: IRunActions,
    private readonly translate: Translate = text => text
  ) {
    host.append(this.root);
    const theme = new Theme(this.root);
    this.notes = new Notes(translate);
    this.header = new Header(model, translate, () => actions.stop(), this.notes.badge);
    this.failure = new Failure(translate, () => actions.showError?.() ?? false);
    this.planned = new Planned(translate);
    this.toolbar = new Toolbar(this.layout, translate, () => this.drawAll());
    this.media = new MediaSection(actions.loadMedia, translate);
    this.pages = pagesIn(translate);
    this.tabs = new Tabs(this.pages, translate('Charts'), () => this.drawAll());
    this.workers = new Workers(model, translate, actions.openWorker ?? null);
    this.charts = new ChartGrid({
      layout: this.layout,
      cursor: new Cursor(),
      theme,
      translate,
      hidden: new Set(),
      stragglers: () => [...stragglersOf(model.state)],
      recoveries: () => model.state?.heals ?? [],
      request: () => this.frames.request(),
      requestAll: () => this.drawAll()
    });
    this.build();
    this.frames = new Frames(
      this.root,
      now => this.draw(now),
      () => theme.readAgain()
    );
    this.follow(theme);
  }

  dispose(): void {
    this.disposables.dispose();
    this.root.remove();
  }

  private build(): void {
    this.tabs.panel.append(this.toolbar.root, this.charts.root);
    this.root.append(
      this.header.root,
      this.failure.root,
      this.tabs.root,
      this.tabs.panel,
      this.media.root,
      this.notes.root,
      this.planned.root,
      this.workers.root
    );
  }

  private follow(theme: Theme): void {
    const { header, toolbar, media, workers, frames, charts } = this;
    const parts = [theme, header, toolbar, media, workers, frames, charts];
    for (const part of parts) {
      this.disposables.add(() => part.dispose());
    }
    this.disposables.add(() => clearTimeout(this.timer));
    this.disposables.add(this.model.subscribe(() => this.frames.request()));
    this.disposables.add(theme.onChange(() => this.drawAll()));
    this.frames.request();
  }

  /** Draw now, including texts. */
  private drawAll(): void {
    this.wordsDrawn = -Infinity;
    this.frames.request();
  }

  private draw(now: number): void {
    const isFull = now - this.wordsDrawn >= WORDS_MS;
    if (isFull) {
      this.wordsDrawn = now;
      this.drawWords();
    }
    if (this.isOver || now - this.tableDrawn >= TABLE_MS) {
      this.tableDrawn = now;
      this.workers.draw();
    }
    this.charts.draw(isFull);
    this.later(isFull);
  }

  private drawWords(): void {
    const { state, connection, reason } = this.model;
    if (connection === 'unreadable' && state === null) {
      const text = refusal(reason, this.translate);
      this.root.replaceChildren(make('p', 'empty', { role: 'alert' }, text));
    }
    this.header.draw(Date.now() / 1000);
    this.failure.draw(this.model.state?.error ?? '');
    this.notes.draw(this.model.state);
    this.planned.draw(this.model.state);
    this.media.draw(this.model.media);
    this.chooseCharts();
  }

  /** Schedule the skipped parts of this frame and the clock of an open run. */
  private later(isFull: boolean): void {
    clearTimeout(this.timer);
    const isGoing = this.model.state !== null && isOpen(this.model.state.status);
    if (!isFull || isGoing) {
      const wait = isFull ? CLOCK_MS : WORDS_MS;
      this.timer = window.setTimeout(() => this.drawAll(), wait);
    }
  }

  private chooseCharts(): void {
    const page = this.pages[this.tabs.chosen]!;
    const all = page.sources(this.model);
    this.toolbar.hasAxis = page.key !== 'system';
    this.toolbar.hasFilter = page.key === 'metrics' && all.length > 1;
    const sources = all.filter(({ title }) => this.toolbar.matches(title));
    if (this.isReloading(all)) {
      return;
    }
    this.shownPage = page.key;
    this.toolbar.root.hidden = all.length === 0;
    const none = this.translate('No metric has this name.');
    this.charts.show(sources, all.length === 0 ? this.emptyText(page) : none);
  }

  private get isOver(): boolean {
    return this.model.state !== null && !isOpen(this.model.state.status);
  }

  private emptyText(page: IPage): string {
    return this.isOver ? (page.emptyAtEnd ?? page.empty) : page.empty;
  }

  /**
   * Return true while a reconnected page still receives old data. The previous picture stays
   * visible.
   */
  private isReloading(sources: readonly ISource[]): boolean {
    const isOfBefore = !this.charts.isEmpty && !this.charts.shows(sources);
    const isSamePage = this.shownPage === this.pages[this.tabs.chosen]!.key;
    return isOfBefore && isSamePage && !this.model.isCaughtUp;
  }
}
