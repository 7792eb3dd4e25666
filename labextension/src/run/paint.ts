import type { Strip } from './decimate';
import { TOO_HIGH } from './series';
import type { ISpan } from './span';

/** Area of a canvas for the lines, in canvas pixels. */
export interface IArea {
  readonly left: number;
  readonly top: number;
  readonly width: number;
  readonly height: number;
}

export interface IPen {
  readonly colour: string;
  readonly width: number;
  readonly alpha: number;
  readonly dash?: readonly number[];
}

/** Points are drawn if there is at most one per this number of pixels. */
const PIXELS_PER_POINT = 12;
const MARK_SIZE = 3.5;
const END_POINT = 4;

/** Draw strips of columns into an area. Keeps no state of the canvas. */
export class Painter {
  private readonly px: Float32Array;
  private readonly perPlace: number;
  private readonly scale: (value: number) => number;

  /**
   * Args:
   *   x: position of each column.
   *   ratio: canvas pixels per CSS pixel.
   */
  constructor(
    private readonly context: CanvasRenderingContext2D,
    private readonly area: IArea,
    x: Float64Array,
    private readonly columns: number,
    private readonly shown: ISpan,
    y: ISpan,
    isLog: boolean,
    private readonly ratio: number
  ) {
    this.px = new Float32Array(columns);
    this.perPlace = area.width / (shown.max - shown.min);
    for (let i = 0; i < columns; i++) {
      this.px[i] = area.left + (x[i]! - shown.min) * this.perPlace;
    }
    this.scale = scaleOf(area, y, isLog);
  }

  /** Clip to the area, with room for the points at its ends. */
  inside(draw: () => void): void {
    const { left, top, width, height } = this.area;
    this.context.save();
    this.context.beginPath();
    const room = END_POINT * this.ratio;
    this.context.rect(left - room, top, width + 2 * room, height);
    this.context.clip();
    this.context.lineJoin = 'round';
    draw();
    this.context.restore();
  }

  /** Draw a line through the means. It spans empty columns and breaks at non-finite ones. */
  line(strip: Strip, pen: IPen): void {
    this.take(pen);
    this.context.beginPath();
    const points = this.trace(strip);
    this.context.stroke();
    if (points * PIXELS_PER_POINT * this.ratio < this.area.width) {
      this.points(strip, pen.width + 1);
    }
  }

  /** Fill the band between the minima of one line and the maxima of another. */
  between(lower: Strip, upper: Strip, colour: string, alpha: number): void {
    this.context.fillStyle = colour;
    this.context.globalAlpha = alpha;
    let first = 0;
    for (let i = 0; i <= this.columns; i++) {
      if (i === this.columns || isBroken(lower, i)) {
        this.fillBetween(lower.low, upper.high, first, i);
        first = i + 1;
      }
    }
  }

  /** Mark non-finite values by crosses at the edge. Crosses do not overlap. */
  marks(strip: Strip, colour: string): void {
    const size = MARK_SIZE * this.ratio;
    this.take({ colour, width: 1.75, alpha: 1 });
    this.context.beginPath();
    let free = -Infinity;
    for (let i = 0; i < this.columns; i++) {
      const bits = strip.bad[i]!;
      if (bits !== 0 && this.px[i]! >= free) {
        const isHigh = (bits & TOO_HIGH) !== 0;
        this.cross(this.px[i]!, isHigh ? size * 1.6 : this.area.height - size * 1.6, size);
        free = this.px[i]! + 3 * size;
      }
    }
    this.context.stroke();
  }

  /** Draw a dashed horizontal line at a value. */
  level(value: number, colour: string): void {
    this.take({ colour, width: 1, alpha: 0.9, dash: [4, 4] });
    const y = Math.round(this.scale(value)) + 0.5;
    this.context.beginPath();
    this.context.moveTo(this.area.left, y);
    this.context.lineTo(this.area.left + this.area.width, y);
    this.context.stroke();
  }

  /** Draw a vertical line at a place of the x axis. */
  cursor(place: number, colour: string): void {
    this.take({ colour, width: 1, alpha: 1 });
    const x = Math.round(this.area.left + (place - this.shown.min) * this.perPlace) + 0.5;
    this.context.beginPath();
    this.context.moveTo(x, this.area.top);
    this.context.lineTo(x, this.area.top + this.area.height);
    this.context.stroke();
  }

  /** Draw a dot on a line. */
  dot(strip: Strip, column: number, colour: string, ground: string): void {
    const y = this.scale(strip.mean[column]!);
    if (y === y) {
      this.take({ colour: ground, width: 2, alpha: 1 });
      this.context.fillStyle = colour;
      this.context.beginPath();
      this.context.arc(this.px[column]!, y, 4 * this.ratio, 0, 2 * Math.PI);
      this.context.stroke();
      this.context.fill();
    }
  }

  /**
   * Return the vertical distance of a line from a height in canvas pixels. NaN if it has no value.
   */
  distance(strip: Strip, column: number, y: number): number {
    return Math.abs(this.scale(strip.mean[column]!) - this.area.top - y);
  }

  private take({ colour, width, alpha, dash }: IPen): void {
    this.context.strokeStyle = colour;
    this.context.lineWidth = width * this.ratio;
    this.context.globalAlpha = alpha;
    this.context.setLineDash(dash?.map(length => length * this.ratio) ?? []);
  }

  private trace(strip: Strip): number {
    const { context, px, scale } = this;
    let isDown = false;
    let points = 0;
    for (let i = 0; i < this.columns; i++) {
      const y = scale(strip.mean[i]!);
      if (y !== y) {
        isDown = isDown && !isBroken(strip, i);
        continue;
      }
      if (isDown) {
        context.lineTo(px[i]!, y);
      } else {
        context.moveTo(px[i]!, y);
      }
      isDown = true;
      points++;
    }
    return points;
  }

  private fillBetween(low: Float32Array, high: Float32Array, first: number, end: number): void {
    this.context.beginPath();
    for (let i = first; i < end; i++) {
      this.edge(i, high[i]!);
    }
    for (let i = end - 1; i >= first; i--) {
      this.edge(i, low[i]!);
    }
    this.context.fill();
  }

  private points({ mean }: Strip, radius: number): void {
    this.context.fillStyle = this.context.strokeStyle;
    for (let i = 0; i < this.columns; i++) {
      const y = this.scale(mean[i]!);
      if (y === y) {
        this.context.beginPath();
        this.context.arc(this.px[i]!, y, radius * this.ratio, 0, 2 * Math.PI);
        this.context.fill();
      }
    }
  }

  private edge(column: number, value: number): void {
    const y = this.scale(value);
    if (y === y) {
      this.context.lineTo(this.px[column]!, y);
    }
  }

  private cross(x: number, y: number, size: number): void {
    const middle = this.area.top + y;
    this.context.moveTo(x - size, middle - size);
    this.context.lineTo(x + size, middle + size);
    this.context.moveTo(x + size, middle - size);
    this.context.lineTo(x - size, middle + size);
  }
}

/** Return true if all values of the column are non-finite. */
function isBroken({ mean, bad }: Strip, column: number): boolean {
  return bad[column] !== 0 && Number.isNaN(mean[column]);
}

/** Return the mapping from values to heights. NaN for values outside a logarithmic scale. */
function scaleOf(area: IArea, y: ISpan, isLog: boolean): (value: number) => number {
  const bottom = area.top + area.height;
  if (!isLog) {
    const per = area.height / (y.max - y.min);
    return value => bottom - (value - y.min) * per;
  }
  const first = Math.log(y.min);
  const per = area.height / (Math.log(y.max) - first);
  return value => (value > 0 ? bottom - (Math.log(value) - first) * per : NaN);
}
