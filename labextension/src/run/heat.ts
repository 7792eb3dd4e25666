import type { Cut } from './decimate';
import { make, setAttribute } from './dom';
import type { Line } from './sources';
import type { Unit } from './words';
import { amount, fill } from './words';
import type { Say } from './words';

/**
 * Colours from the least to the greatest value: even steps of lightness, told apart without colour
 * (after "viridis" of matplotlib, van der Walt and Smith, 2015).
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

/** Ranks from the top down, columns of time from the left: one value for each. */
export class HeatMap {
  readonly root: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private readonly labels: HTMLElement;
  private readonly scale: HTMLElement;
  private image: ImageData | null = null;

  constructor(private readonly say: Say) {
    this.canvas = make('canvas', 'heat-canvas', { role: 'img', 'aria-label': say('heat map') });
    this.labels = make('div', 'heat-ranks', { 'aria-hidden': 'true' });
    this.scale = make('div', 'heat-scale');
    this.root = make('div', 'heat', { dir: 'ltr' }, this.labels, this.canvas, this.scale);
  }

  /**
   * Args:
   *   inset: where the plot above has its lines, in pixels of the page.
   */
  draw(
    lines: readonly Line[],
    bins: Cut,
    title: string,
    unit: Unit,
    inset: { readonly left: number; readonly width: number }
  ): void {
    const image = this.imageOf(Math.max(1, bins.columns), Math.max(1, lines.length));
    const shades = new Shades(lines, bins);
    const pixels = new Uint32Array(image.data.buffer);
    shades.paint(pixels, image.width);
    this.canvas.getContext('2d')?.putImageData(image, 0, 0);
    this.root.style.paddingLeft = `${inset.left}px`;
    this.canvas.style.width = `${inset.width}px`;
    this.label(lines, title, unit, shades);
  }

  private imageOf(width: number, height: number): ImageData {
    if (this.image === null || this.image.width !== width || this.image.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
      this.image = new ImageData(width, height);
    }
    return this.image;
  }

  private label(lines: readonly Line[], title: string, unit: Unit, shades: Shades): void {
    const [first, last] = [lines[0]?.rank ?? 0, lines[lines.length - 1]?.rank ?? 0];
    const low = amount(shades.low, unit);
    const high = amount(shades.high, unit);
    const text = this.say('Heat map of {0}: ranks {1} to {2}, values from {3} to {4}.');
    setAttribute(this.canvas, 'aria-label', fill(text, title, first, last, low, high));
    const key = `${first} ${last} ${low} ${high}`;
    if (this.root.dataset['key'] !== key) {
      this.root.dataset['key'] = key;
      const rank = this.say('rank');
      this.labels.replaceChildren(
        make('span', '', {}, `${rank} ${first}`),
        make('span', '', {}, `${rank} ${last}`)
      );
      this.scale.replaceChildren(low, make('span', 'heat-bar', { 'aria-hidden': 'true' }), high);
    }
  }
}

/** The mean of each rank in each column, and the range in which they are shown. */
class Shades {
  low = Infinity;
  high = -Infinity;
  private readonly values: Float32Array;
  private readonly columns: number;

  constructor(lines: readonly Line[], bins: Cut) {
    this.columns = Math.max(1, bins.columns);
    this.values = new Float32Array(this.columns * Math.max(1, lines.length)).fill(NaN);
    lines.forEach((line, row) => this.addLine(line, bins, row * this.columns));
  }

  paint(pixels: Uint32Array, width: number): void {
    const per = (SHADES - 1) / (this.high - this.low || 1);
    for (let i = 0; i < this.values.length && i < pixels.length; i++) {
      const value = this.values[i]!;
      const shade = Math.round((value - this.low) * per);
      pixels[i] = value === value ? PALETTE[shade]! : 0;
    }
    this.carry(pixels, width);
  }

  /** A column in which a rank said nothing shows what it said before. */
  private carry(pixels: Uint32Array, width: number): void {
    for (let i = 1; i < pixels.length; i++) {
      if (pixels[i] === 0 && i % width !== 0) {
        pixels[i] = pixels[i - 1]!;
      }
    }
  }

  private addLine({ trace }: Line, { from, to, per, columns }: Cut, at: number): void {
    const end = Math.min(to, trace.length);
    for (let column = 0, bin = from; column < columns; column++) {
      let sum = 0;
      let count = 0;
      for (const stop = Math.min(end, bin + per); bin < stop; bin++) {
        if (trace.n[bin]! > 0) {
          sum += trace.mean[bin]!;
          count++;
        }
      }
      if (count > 0) {
        const mean = sum / count;
        this.values[at + column] = mean;
        this.low = mean < this.low ? mean : this.low;
        this.high = mean > this.high ? mean : this.high;
      }
    }
  }
}

/** As the pixels of an image have them, on machines that are little-endian. */
const PALETTE = Uint32Array.from({ length: SHADES }, (_, i) => {
  const at = (i / (SHADES - 1)) * (STOPS.length - 1);
  const below = STOPS[Math.floor(at)] ?? STOPS[0];
  const above = STOPS[Math.ceil(at)] ?? below;
  const mix = (channel: 0 | 1 | 2): number =>
    Math.round(below[channel] + (above[channel] - below[channel]) * (at - Math.floor(at)));
  return ((255 << 24) | (mix(2) << 16) | (mix(1) << 8) | mix(0)) >>> 0;
});
