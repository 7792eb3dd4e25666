import { Disposables } from './dom';
import type { ISpan } from './span';
import { panned, zoomed } from './span';

const WHEEL_STEP = 1.0015;
const KEY_ZOOM = 1.5;
const KEY_PAN = 0.2;

/** Plot controlled by gestures. */
export interface IStretch {
  now(): IShown;
  /** Show a span. Null shows all data. */
  show(span: ISpan | null): void;
  /** Return the x value at a distance in pixels from the left of the plot. */
  valueAt(left: number): number;
}

/** Visible span, span of all data, and the element with the lines. */
export interface IShown {
  readonly all: ISpan;
  readonly shown: ISpan;
  readonly over: HTMLElement;
}

/**
 * Zoom and pan by wheel, drag and keys.
 *
 * The plain wheel scrolls the page. With Ctrl or Cmd, or a pinch on a touchpad, it zooms. With
 * Shift, or sideways, it pans.
 */
export class Gestures {
  private readonly disposables = new Disposables();
  private drag: { readonly x: number; readonly span: ISpan } | null = null;

  constructor(
    host: HTMLElement,
    private readonly stretch: IStretch
  ) {
    const listen = this.disposables.listen.bind(this.disposables);
    listen<WheelEvent>(host, 'wheel', event => this.wheel(event), { passive: false });
    listen<KeyboardEvent>(host, 'keydown', event => this.key(event));
    listen<MouseEvent>(host, 'mousedown', event => this.down(event));
    listen<MouseEvent>(window, 'mousemove', event => this.move(event));
    listen<MouseEvent>(window, 'mouseup', () => (this.drag = null));
    listen<MouseEvent>(host, 'dblclick', () => stretch.show(null));
  }

  dispose(): void {
    this.disposables.dispose();
  }

  private wheel(event: WheelEvent): void {
    const { shown, all, over } = this.stretch.now();
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (event.ctrlKey || event.metaKey) {
      const left = event.clientX - over.getBoundingClientRect().left;
      const factor = WHEEL_STEP ** event.deltaY;
      this.stretch.show(zoomed(shown, all, factor, this.stretch.valueAt(left)));
    } else if (isSideways && shown !== all) {
      const by = event.deltaX || event.deltaY;
      this.stretch.show(panned(shown, all, by / over.clientWidth));
    } else {
      return;
    }
    event.preventDefault();
  }

  private down(event: MouseEvent): void {
    if (event.shiftKey && event.button === 0) {
      this.drag = { x: event.clientX, span: this.stretch.now().shown };
      event.preventDefault();
    }
  }

  private move(event: MouseEvent): void {
    if (this.drag !== null) {
      const { all, over } = this.stretch.now();
      const by = (this.drag.x - event.clientX) / over.clientWidth;
      this.stretch.show(panned(this.drag.span, all, by));
    }
  }

  private key(event: KeyboardEvent): void {
    const { shown, all } = this.stretch.now();
    const middle = (shown.min + shown.max) / 2;
    const acts: Readonly<Record<string, () => ISpan | null>> = {
      ArrowLeft: () => panned(shown, all, -KEY_PAN),
      ArrowRight: () => panned(shown, all, KEY_PAN),
      '+': () => zoomed(shown, all, 1 / KEY_ZOOM, middle),
      '=': () => zoomed(shown, all, 1 / KEY_ZOOM, middle),
      '-': () => zoomed(shown, all, KEY_ZOOM, middle),
      '0': () => null,
      Escape: () => null
    };
    const act = acts[event.key];
    const isPlain = !event.ctrlKey && !event.metaKey && !event.altKey;
    if (act !== undefined && isPlain) {
      this.stretch.show(act());
      event.preventDefault();
      event.stopPropagation();
    }
  }
}
