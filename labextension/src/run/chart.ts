import type { IRecoveryRecord } from '../records';
import { MEDIAN } from './bands';
import { DataTable } from './datatable';
import { describe, entries, place, valueOf } from './describe';
import { Disposables, make, newId, setAttribute, setText } from './dom';
import { Gestures } from './gestures';
import { HeatMap } from './heat';
import { Legend } from './legend';
import { Marks } from './marks';
import type { Layout } from './layout';
import type { IArea } from './paint';
import { Painter } from './paint';
import type { ISettings } from './picture';
import { Picture } from './picture';
import { Plot } from './plot';
import type { ISource } from './sources';
import type { ISpan } from './span';
import type { Theme } from './theme';
import { lineColour } from './theme';
import type { Translate } from './words';
import { amount, fill } from './words';

/** A line closer to the pointer than this is highlighted. */
const NEAR_PIXELS = 24;
/** Up to this number of lines, each is drawn thicker. */
const FEW_LINES = 8;

/** Place under the pointer, shared by the charts with the same axis. */
export class Cursor {
  x = NaN;
  axis = '';
}

/** Objects that a chart shares with its view. */
export interface IChartContext {
  readonly layout: Layout;
  /** Place under the pointer in one of the charts. */
  readonly cursor: Cursor;
  readonly theme: Theme;
  readonly translate: Translate;
  /** Ranks with hidden lines. */
  readonly hidden: Set<number>;
  /** Ranks that always have a labelled line. */
  stragglers(): readonly number[];
  /** Recoveries of the run. */
  recoveries(): readonly IRecoveryRecord[];
  /** Draw in the next frame. */
  request(): void;
  /** Draw in the next frame, including texts. */
  requestAll(): void;
}

/** One chart: lines or bands, legend, heat map of many ranks, and a data table. */
export class Chart {
  readonly root: HTMLElement;
  private readonly disposables = new Disposables();
  private readonly picture: Picture;
  private readonly plot: Plot;
  private readonly legend: Legend;
  private readonly table: DataTable;
  private readonly heat: HeatMap;
  private readonly marks: Marks;
  private readonly image: HTMLElement;
  private readonly readout: HTMLElement;
  private readonly reset: HTMLButtonElement;
  private readonly log: HTMLButtonElement;
  private readonly wide: HTMLButtonElement;
  private alone = true;
  private span: ISpan | null = null;
  private axis: ISettings['x'] = 'place';
  private pointer: { readonly x: number; readonly y: number } | null = null;
  private near = -1;
  private hadColumn = false;
  /** Text of the mark that has the pointer or the focus. */
  private markText = '';
  private painter: Painter | null = null;

  constructor(
    readonly source: ISource,
    private readonly context: IChartContext
  ) {
    const { translate, hidden, theme } = context;
    const request = (): void => context.requestAll();
    this.picture = new Picture(source, hidden);
    this.legend = new Legend(hidden, request, translate);
    this.table = new DataTable(source.title, translate, request);
    this.heat = new HeatMap(translate);
    this.marks = new Marks(translate, words => {
      this.markText = words;
      request();
    });
    this.image = make('div', 'image', { role: 'img', dir: 'ltr', 'aria-label': source.title });
    this.readout = make('span', 'readout');
    this.reset = make('button', 'small', { type: 'button' }, translate('Reset zoom'));
    this.log = this.switch('log', translate('log'), translate('Logarithmic scale of {0}'));
    this.wide = this.switch('wide', '↔', translate('Full width for {0}'));
    this.root = this.build();
    this.plot = new Plot(this.image, source.unit, theme, {
      paint: (canvas, area, ratio) => this.paint(canvas, area, ratio),
      select: span => this.show(span),
      hover: at => this.hover(at),
      resize: request
    });
    this.listen();
  }

  /**
   * Draw the current state.
   *
   * Args:
   *   isFull: also draw texts, legend, heat map and table. They need not follow each frame.
   */
  draw(isFull: boolean): void {
    const { settings } = this;
    if (settings.x !== this.axis) {
      this.axis = settings.x;
      this.show(null);
    }
    if (isFull) {
      this.picture.name(this.context.stragglers());
    }
    const isLog = this.context.layout.has('log', this.source.key);
    this.picture.update(settings, isLog, this.span, this.plot.width);
    this.plot.draw(this.picture, settings.x === 'time');
    const column = this.column();
    if (isFull || column >= 0 || this.hadColumn) {
      this.drawLegend(column);
    }
    this.hadColumn = column >= 0;
    if (isFull) {
      this.drawWords();
    }
  }

  dispose(): void {
    this.disposables.dispose();
    this.root.remove();
  }

  private build(): HTMLElement {
    const { translate } = this.context;
    const id = newId('chart');
    const keys = translate(
      'Drag or Ctrl-wheel to zoom, Shift-drag to pan, double-click to reset. Keys: arrows, +, −, 0.'
    );
    const area = { role: 'group', tabindex: 0, 'aria-labelledby': id, title: keys };
    this.reset.hidden = true;
    const caption = make(
      'figcaption',
      'caption',
      {},
      headingOf(this.source.title, id),
      this.readout,
      make('span', 'switches', {}, this.reset, this.log, this.wide)
    );
    this.heat.root.hidden = true;
    return make(
      'figure',
      'chart',
      {},
      caption,
      make('div', 'plot', area, this.image, this.marks.root),
      this.heat.root,
      this.legend.root,
      this.table.root
    );
  }

  /** There are no other charts: this one has the whole width. */
  set isAlone(isAlone: boolean) {
    this.alone = isAlone;
    this.drawSwitches();
  }

  /** Create a button that toggles a property of the chart's layout. */
  private switch(what: 'log' | 'wide', text: string, name: string): HTMLButtonElement {
    const { layout, requestAll } = this.context;
    const label = fill(name, this.source.title);
    const button = make('button', 'small', { type: 'button', title: label }, text);
    button.setAttribute('aria-label', label);
    this.disposables.listen(button, 'click', () => {
      layout.toggle(what, this.source.key);
      requestAll();
    });
    return button;
  }

  private drawSwitches(): void {
    const { layout } = this.context;
    const isWide = layout.has('wide', this.source.key);
    setAttribute(this.log, 'aria-pressed', String(layout.has('log', this.source.key)));
    setAttribute(this.wide, 'aria-pressed', String(isWide));
    this.wide.hidden = this.alone;
    this.root.classList.toggle('nbdist-chart-wide', isWide);
    this.plot.isLarge = this.alone || isWide;
  }

  private listen(): void {
    const host = this.image.parentElement ?? this.image;
    const gestures = new Gestures(host, {
      now: () => ({ all: this.picture.all, shown: this.picture.shown, over: this.plot.over }),
      show: span => this.show(span),
      valueAt: left => this.plot.valueAt(left)
    });
    this.disposables.listen(this.reset, 'click', () => {
      this.show(null);
      host.focus({ preventScroll: true }); // the focused button is about to be removed
    });
    this.disposables.add(() => this.picture.dispose());
    this.disposables.add(() => this.plot.dispose());
    this.disposables.add(() => gestures.dispose());
  }

  private show(span: ISpan | null): void {
    this.span = span;
    this.reset.hidden = span === null;
    this.context.request();
  }

  private hover(at: { readonly x: number; readonly y: number } | null): void {
    const { cursor } = this.context;
    this.pointer = at;
    cursor.x = at === null ? NaN : at.x;
    cursor.axis = this.axisName;
    this.near = at === null ? -1 : this.nearest(this.columnAt(at.x), at.y);
    this.context.request();
  }

  private nearest(column: number, y: number): number {
    let [rank, least] = [-1, NEAR_PIXELS * devicePixelRatio];
    for (const line of this.shownLines()) {
      const distance = this.painter?.distance(line.strip, column, y) ?? NaN;
      if (distance < least) {
        [rank, least] = [line.rank, distance];
      }
    }
    return rank;
  }

  private shownLines(): Picture['lines'] {
    return this.picture.lines.filter(line => !this.context.hidden.has(line.rank));
  }

  /** Samples by second have no step: their axis is always the time. */
  private get settings(): ISettings {
    const { x, smoothing } = this.context.layout;
    return { x: this.source.grid.axis === 'second' ? 'time' : x, smoothing };
  }

  /** Charts with this axis in common share the cursor. */
  private get axisName(): string {
    return this.settings.x === 'time' ? 'time' : this.source.grid.axis;
  }

  /** Return the column under the pointer, in this chart or in another one. -1 without a pointer. */
  private column(): number {
    const { x, axis } = this.context.cursor;
    const { min, max } = this.picture.shown;
    return axis === this.axisName && x >= min && x <= max ? this.columnAt(x) : -1;
  }

  private columnAt(x: number): number {
    return this.picture.filled(this.picture.columnAt(x));
  }

  private drawLegend(column: number): void {
    const { translate } = this.context;
    this.legend.show(entries(this.picture, column, translate), this.near);
    const x = this.picture.x[column];
    const where = x === undefined ? '' : place(x, this.source.grid.axis, this.settings, translate);
    const pointed = [where, this.nearText(column)].filter(part => part !== '').join(' · ');
    setText(this.readout, this.markText === '' ? pointed : this.markText);
  }

  /** Name and value of the highlighted line. Its legend entry may be out of view. */
  private nearText(column: number): string {
    const near = this.picture.lines.find(line => line.rank === this.near);
    const value = near === undefined ? NaN : valueOf(near.strip, column);
    const rank = `${this.context.translate('rank')} ${this.near}`;
    return Number.isNaN(value) ? '' : `${rank}: ${amount(value, this.source.unit)}`;
  }

  private drawWords(): void {
    const { settings } = this;
    const { recoveries, translate } = this.context;
    this.root.style.setProperty('--nbdist-inset', `${this.plot.inset.left}px`);
    setAttribute(
      this.image,
      'aria-label',
      describe(this.picture, settings, recoveries(), translate)
    );
    this.table.draw(this.picture, settings);
    this.drawSwitches();
    this.heat.root.hidden = this.picture.bands === null;
    if (this.picture.bands !== null) {
      this.heat.draw(this.picture, this.plot.inset);
    }
  }

  private paint(canvas: CanvasRenderingContext2D, area: IArea, ratio: number): void {
    const { x, columns, shown, y, isLog } = this.picture;
    const painter = new Painter(canvas, area, x, columns, shown, y, isLog, ratio);
    this.painter = painter;
    this.marks.draw(this.context.recoveries(), this.plot.inset, recovery =>
      this.picture.partOf(recovery, this.settings)
    );
    painter.inside(() => {
      this.paintBands(painter);
      this.paintLines(painter);
      this.paintWhole(painter);
      this.paintMarks(painter);
      if (this.pointer === null && this.column() >= 0) {
        painter.cursor(this.context.cursor.x, this.context.theme.colours.faint);
      }
    });
  }

  private paintBands(painter: Painter): void {
    const strips = this.picture.bands?.strips;
    const { accent, text } = this.context.theme.colours;
    if (strips !== undefined) {
      painter.between(strips[0]!, strips[6]!, accent, 0.18);
      painter.between(strips[1]!, strips[5]!, accent, 0.22);
      painter.between(strips[2]!, strips[4]!, accent, 0.32);
      painter.line(strips[MEDIAN]!, { colour: text, width: 2, alpha: 1 });
    }
    if (this.source.limit > 0 && this.source.limit < this.picture.y.max) {
      painter.level(this.source.limit, this.context.theme.colours.error);
    }
  }

  private paintLines(painter: Painter): void {
    const lines = this.shownLines();
    const isFew = lines.length <= FEW_LINES;
    const stragglers = this.context.stragglers();
    if (!isFew) {
      const { envelope } = this.picture;
      envelope.fillEnvelope(
        lines.map(line => line.strip),
        this.picture.columns
      );
      painter.between(envelope, envelope, this.context.theme.colours.text, 0.12);
    }
    for (const { rank, strip, raw } of lines) {
      const colour = lineColour(rank);
      const faint = stragglers.includes(rank) ? 1 : isFew ? 0.85 : 0.6;
      const alpha = this.near >= 0 && this.near !== rank ? faint * 0.35 : faint;
      if (isFew) {
        const spread = this.picture.hasRaw ? raw : strip;
        painter.between(spread, spread, colour, 0.2 * alpha);
      }
      painter.line(strip, { colour, width: isFew ? 1.25 : 1, alpha });
    }
  }

  private paintWhole(painter: Painter): void {
    const { text, ground } = this.context.theme.colours;
    const column = this.column();
    if (this.picture.whole !== null) {
      painter.line(this.picture.whole, { colour: text, width: 2.25, alpha: 1 });
    }
    const near = this.picture.lines.find(line => line.rank === this.near);
    if (near !== undefined) {
      painter.line(near.strip, { colour: lineColour(near.rank), width: 2.25, alpha: 1 });
      painter.dot(near.strip, column, lineColour(near.rank), ground);
    } else if (this.picture.whole !== null && column >= 0) {
      painter.dot(this.picture.whole, column, text, ground);
    }
  }

  private paintMarks(painter: Painter): void {
    const { error } = this.context.theme.colours;
    for (const { strip } of this.shownLines()) {
      painter.marks(strip, error);
    }
    if (this.picture.whole !== null) {
      painter.marks(this.picture.whole, error);
    }
  }
}

/** Return the heading of a chart. What the title adds in parentheses is small, so that it fits. */
function headingOf(title: string, id: string): HTMLElement {
  const name = title.split(' (', 1)[0]!;
  const rest = make('span', 'heading-rest', {}, title.slice(name.length));
  return make('span', 'heading', { id, title }, name, rest);
}
