import uPlot from 'uplot';

import { Disposables } from './dom';
import type { IFrame } from './marks';
import type { Picture } from './picture';
import type { IArea } from './paint';
import type { ISpan } from './span';
import type { Theme } from './theme';
import type { Unit } from './words';
import { duration, ticks } from './words';

/** Height of a plot in CSS pixels, alone and beside others. */
const [LARGE, SMALL] = [240, 190] as const;
/** Room for half of the last label of the axis, in pixels. */
const RIGHT = 24;
const TIME_RIGHT = 34;
const LEAST_WIDTH = 120;
const X_AXIS_HEIGHT = 30;
const LEAST_Y_AXIS_WIDTH = 48;
const PIXELS_PER_LETTER = 6.3;
/** A shorter drag is a click. */
const LEAST_DRAG = 5;

/** Callbacks of a plot. */
export interface IPlotEvents {
  /** Draw the lines. The axes are already drawn. */
  paint(context: CanvasRenderingContext2D, area: IArea, ratio: number): void;
  /** The user selected a span of the axis. */
  select(span: ISpan): void;
  /** The pointer is at a place and at a height in canvas pixels. Null if it left the plot. */
  hover(at: { readonly x: number; readonly y: number } | null): void;
  /** The width has changed. */
  resize(): void;
}

/** Axes, grid and pointer, drawn by uPlot. The owner draws the lines. */
export class Plot {
  private readonly disposables = new Disposables();
  private chart: uPlot;
  private isLog = false;
  private picture: Picture | null = null;
  private isTime = false;
  private hadPointer = false;
  private height: number = LARGE;

  constructor(
    private readonly host: HTMLElement,
    private readonly unit: Unit,
    private readonly theme: Theme,
    private readonly events: IPlotEvents
  ) {
    this.chart = this.create();
    const observer = new ResizeObserver(() => this.resize());
    observer.observe(host);
    this.disposables.add(() => observer.disconnect());
    this.disposables.add(() => this.chart.destroy());
  }

  /** Width of the line area in canvas pixels. */
  get width(): number {
    return Math.max(1, this.chart.bbox.width);
  }

  /** Line area in CSS pixels. */
  get inset(): IFrame {
    const { left, top, width, height } = this.chart.bbox;
    const ratio = uPlot.pxRatio;
    return {
      left: left / ratio,
      top: top / ratio,
      width: width / ratio,
      height: height / ratio
    };
  }

  /** Element that receives pointer events. */
  get over(): HTMLElement {
    return this.chart.over;
  }

  /** Return the x value at a distance in pixels from the left of the plot. */
  valueAt(left: number): number {
    return this.chart.posToVal(left, 'x');
  }

  set isLarge(isLarge: boolean) {
    this.height = isLarge ? LARGE : SMALL;
    this.resize();
  }

  draw(picture: Picture, isTime: boolean): void {
    this.picture = picture;
    this.isTime = isTime;
    if (picture.isLog !== this.isLog) {
      this.isLog = picture.isLog;
      this.chart.destroy();
      this.chart = this.create();
    }
    const { min, max } = picture.shown;
    this.chart.setData([
      [min, max],
      [picture.y.min, picture.y.max]
    ]);
  }

  dispose(): void {
    this.disposables.dispose();
  }

  private resize(): void {
    const width = this.size();
    const { height } = this;
    const isOther = width !== this.chart.width || height !== this.chart.height;
    if (this.host.clientWidth > 0 && isOther) {
      this.chart.setSize({ width, height });
      this.events.resize();
    }
  }

  private size(): number {
    return Math.max(LEAST_WIDTH, this.host.clientWidth);
  }

  private create(): uPlot {
    const chart = new uPlot(this.options(), undefined, this.host);
    chart.over.classList.add('nbdist-over');
    return chart;
  }

  private options(): uPlot.Options {
    return {
      width: this.size(),
      height: this.height,
      padding: [8, () => (this.isTime ? TIME_RIGHT : RIGHT), 0, 0],
      legend: { show: false },
      cursor: this.cursor(),
      scales: {
        x: { time: false, range: () => this.range('shown') },
        y: { distr: this.isLog ? 3 : 1, range: () => this.range('y') }
      },
      axes: [this.xAxis(), this.yAxis()],
      series: [{}, { paths: () => null, points: { show: false } }],
      hooks: {
        draw: [chart => this.events.paint(chart.ctx, chart.bbox, uPlot.pxRatio)],
        setSelect: [chart => this.selected(chart)],
        setCursor: [chart => this.moved(chart)]
      }
    };
  }

  private cursor(): uPlot.Cursor {
    const unlessShift: uPlot.Cursor.MouseListenerFactory = (_chart, _target, handler) => event => {
      if (!event.shiftKey) {
        handler(event);
      }
      return null;
    };
    return {
      y: false,
      points: { show: false },
      drag: { x: true, y: false, setScale: false, dist: LEAST_DRAG },
      bind: { mousedown: unlessShift, dblclick: () => () => null }
    };
  }

  private range(of: 'shown' | 'y'): uPlot.Range.MinMax {
    const span = this.picture?.[of] ?? { min: this.isLog ? 1 : 0, max: 10 };
    return [span.min, span.max];
  }

  private xAxis(): uPlot.Axis {
    return {
      ...this.axis(),
      size: X_AXIS_HEIGHT,
      space: 70,
      incrs: (_chart, _axis, min, max) => (this.isTime ? timeSteps(max - min) : placeSteps()),
      values: (_chart, splits, _axis, _space, increment) =>
        this.isTime
          ? splits.map(value =>
              increment >= 1 ? duration(value) : (ticks([value], 'seconds', increment)[0] ?? '')
            )
          : ticks(splits, 'number', increment)
    };
  }

  private yAxis(): uPlot.Axis {
    return {
      ...this.axis(),
      space: 38,
      ...(this.unit === 'bytes' ? { incrs: binarySteps() } : {}),
      size: (_chart, values) => {
        const longest = (values ?? []).reduce(
          (most, text) => Math.max(most, (text ?? '').length),
          0
        );
        return Math.max(LEAST_Y_AXIS_WIDTH, Math.ceil(longest * PIXELS_PER_LETTER) + 18);
      },
      values: (_chart, splits, _axis, _space, increment) =>
        this.isLog
          ? splits.map(value => (isRound(value) ? (ticks([value], this.unit, value)[0] ?? '') : ''))
          : ticks(splits, this.unit, increment)
    };
  }

  private axis(): uPlot.Axis {
    return {
      stroke: () => this.theme.colours.faint,
      font: this.theme.colours.font,
      gap: 6,
      grid: { stroke: () => this.theme.colours.grid, width: 1 },
      ticks: { show: false }
    };
  }

  private selected(chart: uPlot): void {
    const { left, width } = chart.select;
    if (width >= LEAST_DRAG) {
      this.events.select({ min: this.valueAt(left), max: this.valueAt(left + width) });
    }
    if (width > 0) {
      chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    }
  }

  private moved(chart: uPlot): void {
    const { left, top } = chart.cursor;
    const isThere = left !== undefined && top !== undefined && left >= 0;
    if (isThere) {
      this.events.hover({ x: this.valueAt(left), y: top * uPlot.pxRatio });
    } else if (this.hadPointer) {
      this.events.hover(null);
    }
    this.hadPointer = isThere;
  }
}

/**
 * Return true for 1, 2, 5, 10 ...: only these are labelled on a logarithmic scale, for lack of
 * room.
 */
function isRound(value: number | null): boolean {
  const first = value === null ? '' : value.toPrecision(2);
  return /^0*\.?0*[125](\.?0)?0*(e[+-]?\d+)?$/.test(first);
}

/** Return the increments of an axis of bytes: powers of 2, so that labels are round. */
function binarySteps(): number[] {
  return Array.from({ length: 50 }, (_, power) => 2 ** power);
}

/** Return the increments of a step axis: whole numbers. */
function placeSteps(): number[] {
  const steps: number[] = [];
  for (let power = 1; power < 1e15; power *= 10) {
    steps.push(power, 2 * power, 5 * power);
  }
  return steps;
}

/** Return the increments of a time axis: whole seconds, minutes, hours and days. */
function timeSteps(length: number): number[] {
  const parts = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30];
  const minutes = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  return [...parts, ...minutes, ...[2, 5, 10, 50, 100].map(days => days * 86400), length];
}
