import { Chart } from './chart';
import type { IChartContext } from './chart';
import { Disposables, make } from './dom';
import type { ISource } from './sources';
import { fill } from './words';

/** Maximum number of charts. A filter by name selects others. */
const MOST_CHARTS = 48;
/** Charts within this distance from the visible area are drawn. */
const MARGIN = '200px';

/** Grid of charts, one for each source. Only charts in the visible area are drawn. */
export class ChartGrid {
  readonly root = make('div', 'charts');
  private readonly disposables = new Disposables();
  private readonly observer: IntersectionObserver;
  private readonly outside = new Set<Element>();
  private readonly remark = make('p', 'empty');
  private shown: Chart[] = [];

  constructor(private readonly context: IChartContext) {
    this.observer = new IntersectionObserver(entries => this.see(entries), { rootMargin: MARGIN });
    this.disposables.add(() => this.observer.disconnect());
    this.disposables.add(() => this.show([], ''));
  }

  /** The charts show data of these sources, in part. */
  shows(sources: readonly ISource[]): boolean {
    return sources.some(({ grid }) => this.shown.some(({ source }) => source.grid === grid));
  }

  get isEmpty(): boolean {
    return this.shown.length === 0;
  }

  /**
   * Show a chart of each source. Charts of sources that were shown stay.
   *
   * Args:
   *   empty: text in place of the charts if there are no sources.
   */
  show(sources: readonly ISource[], empty: string): void {
    const charts = sources.slice(0, MOST_CHARTS).map(source => this.chartOf(source));
    this.shown.filter(chart => !charts.includes(chart)).forEach(chart => this.drop(chart));
    this.shown = charts;
    charts.forEach((chart, i) => {
      if (this.root.children[i] !== chart.root) {
        this.root.insertBefore(chart.root, this.root.children[i] ?? null); // keeps the focus
      }
      chart.isAlone = charts.length === 1;
    });
    this.explain(sources.length - charts.length, empty);
  }

  draw(isFull: boolean): void {
    for (const chart of this.shown) {
      if (!this.outside.has(chart.root)) {
        chart.draw(isFull);
      }
    }
  }

  dispose(): void {
    this.disposables.dispose();
  }

  private explain(more: number, empty: string): void {
    const { translate } = this.context;
    const text = fill(translate('{0} more metrics: filter them by name.'), more);
    this.remark.textContent = this.isEmpty ? empty : text;
    if (this.isEmpty || more > 0) {
      this.root.append(this.remark);
    } else {
      this.remark.remove();
    }
  }

  private chartOf(source: ISource): Chart {
    const isSame = ({ source: old }: Chart): boolean =>
      old.key === source.key && old.title === source.title && old.grid === source.grid;
    const known = this.shown.find(isSame);
    if (known !== undefined) {
      return known;
    }
    const chart = new Chart(source, this.context);
    this.observer.observe(chart.root);
    return chart;
  }

  private drop(chart: Chart): void {
    this.observer.unobserve(chart.root);
    this.outside.delete(chart.root);
    chart.dispose();
  }

  private see(entries: readonly IntersectionObserverEntry[]): void {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && this.outside.delete(target)) {
        this.context.requestAll();
      } else if (!isIntersecting && target.isConnected) {
        this.outside.add(target);
      }
    }
  }
}
