import type { IRecoveryRecord } from '../records';
import { make } from './dom';
import type { Translate } from './words';
import { recovered } from './words';

/** Area of the lines in CSS pixels, relative to its container. */
export interface IFrame {
  readonly left: number;
  readonly top: number;
  readonly width: number;
  readonly height: number;
}

/** Marks of recoveries: vertical lines over a chart, each with a sign that explains it. */
export class Marks {
  readonly root = make('div', 'marks', { dir: 'ltr' });
  private readonly marks: HTMLElement[] = [];

  /**
   * Args:
   *   onPoint: callback with the text of the mark that has the pointer or the focus, else ''.
   */
  constructor(
    private readonly translate: Translate,
    private readonly onPoint: (words: string) => void
  ) {}

  /**
   * Args:
   *   partOf: position of a recovery in the frame, in 0..1. Other values are not drawn.
   */
  draw(
    recoveries: readonly IRecoveryRecord[],
    frame: IFrame,
    partOf: (recovery: IRecoveryRecord) => number
  ): void {
    for (const recovery of recoveries.slice(this.marks.length)) {
      this.add(recovered(recovery, this.translate));
    }
    const { style } = this.root;
    style.left = `${frame.left}px`;
    style.top = `${frame.top}px`;
    style.width = `${frame.width}px`;
    style.height = `${frame.height}px`;
    recoveries.forEach((recovery, i) => {
      const part = partOf(recovery);
      const mark = this.marks[i]!;
      mark.hidden = !(part >= 0 && part <= 1);
      mark.style.left = `${100 * part}%`;
    });
  }

  private add(words: string): void {
    const named = { role: 'img', tabindex: 0, 'aria-label': words, title: words };
    const sign = make('span', 'mark-sign', named, '✚');
    for (const event of ['focus', 'pointerenter']) {
      sign.addEventListener(event, () => this.onPoint(words));
    }
    for (const event of ['blur', 'pointerleave']) {
      sign.addEventListener(event, () => this.onPoint(''));
    }
    const mark = make('div', 'mark', {}, sign);
    this.marks.push(mark);
    this.root.append(mark);
  }
}
