import { Chart } from './chart';
import type { ChartContext } from './chart';
import { Disposables, make } from './dom';
import { Frames } from './frames';
import { Header } from './header';
import type { RunModel } from './model';
import { Notes } from './notes';
import type { Settings } from './picture';
import { Planned } from './planned';
import type { Source } from './sources';
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
import type { Say } from './words';
import { stragglersOf, Workers } from './workers';

/** Words, tables and heat maps are drawn no more often than this. */
const WORDS_MS = 250;
/** The table of the workers, which may have many rows. */
const TABLE_MS = 1000;
/** While a run is open its clock goes on without news. */
const CLOCK_MS = 1000;

/** What a reader may have done about the run. */
export interface RunActions {
  stop(): void;
}

interface Page {
  readonly key: string;
  readonly title: string;
  readonly sources: (model: RunModel) => Source[];
  /** What is said while there is nothing to draw. */
  readonly empty: string;
}

const PAGES: readonly Page[] = [
  {
    key: 'metrics',
    title: 'Metrics',
    sources: metricSources,
    empty: 'No metric yet: `report(loss=…)` in the cell, or the last line of a step.'
  },
  { key: 'time', title: 'Step time', sources: stepTimeSources, empty: 'No step yet.' },
  { key: 'rate', title: 'Throughput', sources: throughputSources, empty: 'No step yet.' },
  { key: 'memory', title: 'Memory', sources: memorySources, empty: 'No memory was measured yet.' },
  {
    key: 'share',
    title: 'Network & input',
    sources: shareSources,
    empty: 'Nothing was measured yet.'
  }
];

/** A run, live or as it was: plain elements in `host`, drawn when the model changes. */
export class RunView {
  private readonly disposables = new Disposables();
  private readonly settings: Settings = { x: 'place', isLog: false, smoothing: 0 };
  /** Keys that are pressed in it are its own: JupyterLab has commands for arrows and Enter. */
  private readonly root = make('div', 'run', { 'data-lm-suppress-shortcuts': 'true' });
  private readonly frames: Frames;
  private readonly header: Header;
  private readonly notes: Notes;
  private readonly planned: Planned;
  private readonly toolbar: Toolbar;
  private readonly tabs: Tabs;
  private readonly workers: Workers;
  private readonly context: ChartContext;
  private readonly charts = make('div', 'charts');
  private shown: Chart[] = [];
  private sourceKeys = '';
  private wordsDrawn = -Infinity;
  private tableDrawn = -Infinity;
  private timer = 0;

  constructor(
    host: HTMLElement,
    private readonly model: RunModel,
    actions: RunActions,
    private readonly say: Say = text => text
  ) {
    host.append(this.root);
    const theme = new Theme(this.root);
    this.header = new Header(model, say, () => actions.stop());
    this.notes = new Notes(say);
    this.planned = new Planned(say);
    this.toolbar = new Toolbar(this.settings, say, () => this.drawAll());
    const tabs = PAGES.map(({ key, title }) => ({ key, title: say(title) }));
    this.tabs = new Tabs(tabs, say('Charts'), () => this.drawAll());
    this.workers = new Workers(model, say);
    this.context = {
      settings: this.settings,
      theme,
      say,
      hidden: new Set(),
      stragglers: () => [...stragglersOf(model.state)],
      recoveries: () => model.state?.heals ?? [],
      request: () => this.frames.request(),
      requestAll: () => this.drawAll()
    };
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
    this.tabs.panel.append(this.toolbar.root, this.charts);
    this.root.append(
      this.header.root,
      this.planned.root,
      this.notes.root,
      this.tabs.root,
      this.tabs.panel,
      this.workers.root
    );
  }

  private follow(theme: Theme): void {
    const parts = [theme, this.header, this.toolbar, this.workers, this.frames];
    for (const part of parts) {
      this.disposables.add(() => part.dispose());
    }
    this.disposables.add(() => this.dropCharts());
    this.disposables.add(() => clearTimeout(this.timer));
    this.disposables.add(this.model.subscribe(() => this.frames.request()));
    this.disposables.add(theme.onChange(() => this.drawAll()));
    this.frames.request();
  }

  /** Draw the words too, however lately they were drawn. */
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
    const isOver = this.model.state !== null && !isOpen(this.model.state.status);
    if (isOver || now - this.tableDrawn >= TABLE_MS) {
      this.tableDrawn = now;
      this.workers.draw();
    }
    for (const chart of this.shown) {
      chart.draw(isFull);
    }
    this.later(isFull);
  }

  private drawWords(): void {
    this.header.draw(Date.now() / 1000);
    this.notes.draw(this.model.state);
    this.planned.draw(this.model.state);
    this.chooseCharts();
  }

  /** What was left out of this frame follows; and the clock of an open run goes on. */
  private later(isFull: boolean): void {
    clearTimeout(this.timer);
    const isGoing = this.model.state !== null && isOpen(this.model.state.status);
    if (!isFull || isGoing) {
      const wait = isFull ? CLOCK_MS : WORDS_MS;
      this.timer = window.setTimeout(() => this.drawAll(), wait);
    }
  }

  private chooseCharts(): void {
    const page = PAGES[this.tabs.chosen]!;
    const all = page.sources(this.model);
    const isChoice = page.key === 'metrics';
    if (isChoice) {
      this.toolbar.offer(all);
    }
    this.toolbar.hasMetrics = isChoice;
    const { chosen } = this.toolbar;
    const sources = isChoice ? all.filter(source => source.key === chosen) : all;
    const keys = [page.key, ...sources.map(source => source.title)].join('|');
    const isOnGrid = sources.every(({ grid }, i) => this.shown[i]?.source.grid === grid);
    if ((keys === this.sourceKeys && isOnGrid) || this.isComingAgain(page, sources)) {
      return;
    }
    this.sourceKeys = keys;
    this.dropCharts();
    this.shown = sources.map(source => new Chart(source, this.context));
    const empty = make('p', 'empty', {}, this.say(page.empty));
    this.toolbar.root.hidden = sources.length === 0;
    this.charts.replaceChildren(
      ...(sources.length === 0 ? [empty] : this.shown.map(one => one.root))
    );
  }

  /** After a reset what was seen stays until all of it has come again. */
  private isComingAgain(page: Page, sources: readonly Source[]): boolean {
    const [shown] = this.shown;
    const isOfBefore = shown !== undefined && shown.source.grid !== sources[0]?.grid;
    return isOfBefore && !this.model.isCaughtUp && this.sourceKeys.startsWith(`${page.key}|`);
  }

  private dropCharts(): void {
    for (const chart of this.shown.splice(0)) {
      chart.dispose();
    }
  }
}
