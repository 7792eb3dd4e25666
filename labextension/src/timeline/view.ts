import type { ITimeline, LaneKind } from '../records';
import { Disposables, make, newId, setText } from '../run/dom';
import { Frames } from '../run/frames';
import { Gestures } from '../run/gestures';
import type { ISpan } from '../run/span';
import { Theme } from '../run/theme';
import type { Translate } from '../run/words';
import { amount, ticks } from '../run/words';
import type { ILane } from './lanes';
import { endOf, firstAfter, lanesOf, spanAt } from './lanes';

const LABELS = 190;
const ROW = 18;
const BAR = 13;
const AXIS = 22;
/** Room for the last label of the axis. */
const RIGHT = 8;
const LEAST_WIDTH = 320;
/** Distance between two labels of the axis. */
const TICK_PIXELS = 110;
const MICRO = 1e-6;
/** Pixels between the pointer and a span that it means. */
const NEAR_PIXELS = 2;

/** Colours of the kinds, distinct under colour blindness: those of the static picture. */
const COLOURS: Readonly<Record<LaneKind, string>> = {
  compute: '#1f77d0',
  collective: '#d55e00',
  copies: '#00906a',
  input: '#a87b00'
};

/** Timeline of devices that zooms: one row per lane, time from left to right. */
export class TimelineView {
  readonly root: HTMLElement;
  private readonly disposables = new Disposables();
  private readonly lanes: readonly ILane[];
  private readonly all: ISpan;
  private readonly canvas: HTMLCanvasElement;
  private readonly readout = make('span', 'readout', { role: 'status' });
  private readonly reset: HTMLButtonElement;
  private readonly theme: Theme;
  private readonly frames: Frames;
  private span: ISpan | null = null;

  constructor(
    private readonly timeline: ITimeline,
    description: string,
    translate: Translate
  ) {
    this.lanes = lanesOf(timeline);
    this.all = { min: 0, max: endOf(this.lanes) || 1 };
    this.canvas = make('canvas', 'timeline-canvas', { role: 'img', 'aria-label': description });
    this.reset = make('button', 'small', { type: 'button' }, translate('Reset zoom'));
    this.reset.hidden = true;
    const id = newId('timeline');
    const keys = translate(
      'Ctrl-wheel to zoom, Shift-drag to pan, double-click to reset. Keys: arrows, +, −, 0.'
    );
    const area = { role: 'group', tabindex: 0, 'aria-labelledby': id, title: keys };
    const plot = make('div', 'timeline', area, this.canvas);
    const heading = make('span', 'heading', { id }, translate('Timeline'));
    const caption = make('figcaption', 'caption', {}, heading, this.readout, this.reset);
    const figure = make('figure', '', {}, caption, plot);
    this.root = make('div', 'run', { 'data-lm-suppress-shortcuts': 'true' }, figure);
    this.theme = new Theme(this.root);
    this.frames = new Frames(
      this.root,
      () => this.draw(),
      () => this.theme.readAgain()
    );
    this.listen(plot);
  }

  dispose(): void {
    this.disposables.dispose();
    this.root.remove();
  }

  private listen(plot: HTMLElement): void {
    const gestures = new Gestures(plot, {
      now: () => ({ all: this.all, shown: this.span ?? this.all, over: this.canvas }),
      show: span => this.show(span),
      valueAt: left => this.timeAt(left)
    });
    const observer = new ResizeObserver(() => this.frames.request());
    observer.observe(plot);
    this.disposables.listen(this.reset, 'click', () => {
      this.show(null);
      plot.focus({ preventScroll: true }); // the focused button is about to be removed
    });
    this.disposables.listen<MouseEvent>(this.canvas, 'mousemove', event => this.hover(event));
    this.disposables.listen(this.canvas, 'mouseleave', () => setText(this.readout, ''));
    this.disposables.add(() => observer.disconnect());
    this.disposables.add(() => gestures.dispose());
    this.disposables.add(() => this.theme.dispose());
    this.disposables.add(() => this.frames.dispose());
    this.disposables.add(this.theme.onChange(() => this.frames.request()));
    this.frames.request();
  }

  private show(span: ISpan | null): void {
    this.span = span;
    this.reset.hidden = span === null;
    this.frames.request();
  }

  private get shown(): ISpan {
    return this.span ?? this.all;
  }

  private get width(): number {
    return Math.max(LEAST_WIDTH, this.canvas.parentElement?.clientWidth ?? 0);
  }

  /** Pixels per microsecond. */
  private get scale(): number {
    return (this.width - LABELS - RIGHT) / (this.shown.max - this.shown.min);
  }

  private timeAt(left: number): number {
    return this.shown.min + (left - LABELS) / this.scale;
  }

  private hover({ offsetX, offsetY }: MouseEvent): void {
    const lane = this.lanes[Math.floor(offsetY / ROW)];
    const near = NEAR_PIXELS / this.scale;
    const i = lane === undefined ? -1 : spanAt(lane, this.timeAt(offsetX), near);
    setText(this.readout, lane === undefined || i < 0 ? '' : this.textOf(lane, i));
  }

  private textOf(lane: ILane, i: number): string {
    const [begin, end] = [lane.begins[i]!, lane.ends[i]!];
    const operation = this.timeline.names[lane.names[i]!] ?? '';
    const time = `${amount((end - begin) * MICRO, 'seconds')} at ${amount(begin * MICRO, 'seconds')}`;
    return [lane.name, operation, time].join(' · ');
  }

  private draw(): void {
    const ratio = devicePixelRatio;
    const { width } = this;
    const height = this.lanes.length * ROW + AXIS;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext('2d');
    if (context === null) {
      return;
    }
    context.scale(ratio, ratio);
    context.font = this.theme.colours.font;
    this.drawAxis(context);
    this.lanes.forEach((lane, row) => this.drawLane(context, lane, row * ROW));
  }

  private drawAxis(context: CanvasRenderingContext2D): void {
    const { shown, scale } = this;
    const { grid, faint } = this.theme.colours;
    const bottom = this.lanes.length * ROW;
    const increment = niceStep(TICK_PIXELS / scale);
    const times: number[] = [];
    for (let at = Math.ceil(shown.min / increment) * increment; at <= shown.max; at += increment) {
      times.push(at);
    }
    const labels = ticks(
      times.map(time => time * MICRO),
      'seconds',
      increment * MICRO
    );
    times.forEach((time, i) => {
      const x = LABELS + (time - shown.min) * scale;
      context.fillStyle = grid;
      context.fillRect(x, 0, 1, bottom);
      context.fillStyle = faint;
      const label = labels[i]!;
      const { width } = context.measureText(label);
      context.fillText(label, Math.min(x, this.width - width), bottom + 15);
    });
  }

  private drawLane(context: CanvasRenderingContext2D, lane: ILane, y: number): void {
    const { shown, scale } = this;
    context.fillStyle = this.theme.colours.text;
    context.fillText(lane.name, 0, y + BAR - 2, LABELS - 8);
    context.fillStyle = COLOURS[lane.kind];
    const right = this.width - RIGHT;
    for (let i = firstAfter(lane, shown.min); i < lane.begins.length; i++) {
      const x = LABELS + (lane.begins[i]! - shown.min) * scale;
      if (x > right) {
        break;
      }
      const from = Math.max(LABELS, x);
      const to = Math.min(right, LABELS + (lane.ends[i]! - shown.min) * scale);
      context.fillRect(from, y, Math.max(1, to - from), BAR);
    }
  }
}

/** Return the smallest of 1, 2 or 5 times a power of ten that is at least `least`. */
function niceStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5].find(factor => factor * power >= least) ?? 10);
}
