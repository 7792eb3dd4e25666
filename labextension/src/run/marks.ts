import type { RecoveryRecord } from '../records';
import { make } from './dom';
import type { Say } from './words';
import { recovered } from './words';

/** Where lines are drawn, in pixels of the page, from the corner of what it is in. */
export interface Frame {
  readonly left: number;
  readonly top: number;
  readonly width: number;
  readonly height: number;
}

/** Where a run was recovered: upright lines over a chart, each with a sign that says what happened. */
export class Marks {
  readonly root = make('div', 'marks', { dir: 'ltr' });
  private readonly marks: HTMLElement[] = [];

  /**
   * Args:
   *   told: is given the words of the mark that is pointed at, or has the focus; else nothing.
   */
  constructor(
    private readonly say: Say,
    private readonly told: (words: string) => void
  ) {}

  /**
   * Args:
   *   partOf: where in the frame a recovery is, from 0 to 1; elsewhere it is not seen.
   */
  draw(recoveries: readonly RecoveryRecord[], frame: Frame, partOf: (recovery: RecoveryRecord) => number): void {
    for (const recovery of recoveries.slice(this.marks.length)) {
      this.add(recovered(recovery, this.say));
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
      sign.addEventListener(event, () => this.told(words));
    }
    for (const event of ['blur', 'pointerleave']) {
      sign.addEventListener(event, () => this.told(''));
    }
    const mark = make('div', 'mark', {}, sign);
    this.marks.push(mark);
    this.root.append(mark);
  }
}
