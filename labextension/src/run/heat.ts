import { Strip } from './decimate';
import { make, setAttribute } from './dom';
import type { Picture } from './picture';
import type { ILine } from './sources';
import type { Translate } from './words';
import { amount, fill } from './words';

/**
 * Colours from minimum to maximum in even steps of lightness, legible without colour vision (after
 * "viridis" of matplotlib, van der Walt and Smith, 2015).
 */
const STOPS = [
  [68, 1, 84],
  [71, 44, 122],
  [59, 81, 139],
  [44, 113, 142],
  [33, 144, 141],
  [39, 173, 129],
  [92, 200, 99],
  [170, 220, 50],
  [253, 231, 37]
] as const;
const SHADES = 256;
/** Upper limit of a rank's distance from the median, as a multiple of the interquartile range. */
const FARTHEST = 4;
/** Indices of lower quartile, median and upper quartile. */
const [LOWER, MIDDLE, UPPER] = [2, 3, 4] as const;

/** Horizontal extent of the plot above, in CSS pixels. */
export interface IInset {
  readonly left: number;
  readonly width: number;
}

/**
 * Heat map: ranks from top to bottom, time from left to right.
 *
 * Amounts are shown as they are. Other metrics vary more over time than between ranks, so their
 * distance from the median of the ranks is shown.
 */
export class HeatMap {
  readonly root: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private readonly labels: HTMLElement;
  private readonly scale: HTMLElement;
  private image: ImageData | null = null;
  private shown = '';

  constructor(private readonly translate: Translate) {
    this.canvas = make('canvas', 'heat-canvas', {
      role: 'img',
      'aria-label': translate('heat map')
    });
    this.labels = make('div', 'heat-ranks', { 'aria-hidden': 'true' });
    this.scale = make('div', 'heat-scale');
    this.root = make('div', 'heat', { dir: 'ltr' }, this.labels, this.canvas, this.scale);
  }

  draw(picture: Picture, inset: IInset): void {
    const image = this.imageOf(Math.max(1, picture.columns), Math.max(1, picture.ranks.length));
    const shades = new Shades(picture);
    shades.paint(new Uint32Array(image.data.buffer));
    this.canvas.getContext('2d')?.putImageData(image, 0, 0);
    this.labels.style.width = `${inset.left}px`;
    this.root.style.paddingLeft = `${inset.left}px`;
    this.canvas.style.width = `${inset.width}px`;
    this.label(picture, shades);
  }

  private imageOf(width: number, height: number): ImageData {
    if (this.image === null || this.image.width !== width || this.image.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
      this.image = new ImageData(width, height);
    }
    return this.image;
  }

  private label({ source, ranks }: Picture, shades: Shades): void {
    const { translate } = this;
    const { unit, isAmount, title } = source;
    const [first, last] = [ranks[0]?.rank ?? 0, ranks[ranks.length - 1]?.rank ?? 0];
    const low = isAmount ? amount(shades.low, unit) : translate('below median');
    const high = isAmount ? amount(shades.high, unit) : translate('above median');
    const text = [title, first, last, low, high].join(' ');
    if (text === this.shown) {
      return;
    }
    this.shown = text;
    const words = translate('Heat map of {0}: ranks {1} to {2}, from {3} to {4}.');
    setAttribute(this.canvas, 'aria-label', fill(words, title, first, last, low, high));
    const marks = [`${first}`, translate('rank'), `${last}`].map(mark =>
      make('span', '', {}, mark)
    );
    this.labels.replaceChildren(...marks);
    this.scale.replaceChildren(low, make('span', 'heat-bar', { 'aria-hidden': 'true' }), high);
  }
}

/** Value per rank and column, and the range of the colours. */
class Shades {
  low = Infinity;
  high = -Infinity;
  private readonly values: Float32Array;
  private readonly columns: number;
  private readonly strip = new Strip();

  constructor(picture: Picture) {
    this.columns = Math.max(1, picture.columns);
    this.values = new Float32Array(this.columns * Math.max(1, picture.ranks.length)).fill(NaN);
    picture.ranks.forEach((line, row) => this.addLine(picture, line, row * this.columns));
    if (!picture.source.isAmount) {
      [this.low, this.high] = [-FARTHEST, FARTHEST];
    }
  }

  /** Paint the pixels. An empty column repeats the rank's last value. */
  paint(pixels: Uint32Array): void {
    const per = (SHADES - 1) / (this.high - this.low || 1);
    for (let i = 0; i < pixels.length; i++) {
      const value = this.values[i]!;
      const shade = Math.round((value - this.low) * per);
      const before = i % this.columns === 0 ? 0 : pixels[i - 1]!;
      pixels[i] = value === value ? PALETTE[Math.min(SHADES - 1, Math.max(0, shade))]! : before;
    }
  }

  private addLine({ source, bins, bands }: Picture, { trace }: ILine, at: number): void {
    const { mean } = this.strip.fill(trace, bins);
    const strips = source.isAmount ? undefined : bands?.strips;
    for (let column = 0; column < bins.columns; column++) {
      const value = mean[column]! - (strips?.[MIDDLE]?.mean[column] ?? 0);
      const spread = (strips?.[UPPER]?.mean[column] ?? 1) - (strips?.[LOWER]?.mean[column] ?? 0);
      this.take(at + column, spread > 0 ? value / spread : value === value ? 0 : NaN);
    }
  }

  private take(at: number, value: number): void {
    this.values[at] = value;
    this.low = value < this.low ? value : this.low;
    this.high = value > this.high ? value : this.high;
  }
}

/** Colours as little-endian RGBA pixels. */
const PALETTE = Uint32Array.from({ length: SHADES }, (_, i) => {
  const at = (i / (SHADES - 1)) * (STOPS.length - 1);
  const below = STOPS[Math.floor(at)] ?? STOPS[0];
  const above = STOPS[Math.ceil(at)] ?? below;
  const mix = (channel: 0 | 1 | 2): number =>
    Math.round(below[channel] + (above[channel] - below[channel]) * (at - Math.floor(at)));
  return ((255 << 24) | (mix(2) << 16) | (mix(1) << 8) | mix(0)) >>> 0;
});
