import { make, setAttribute, setText } from './dom';
import { lineColour } from './theme';
import type { Translate } from './words';
import { fill } from './words';

/** Legend entry. A line with a rank can be hidden, an entry with a null rank cannot. */
export interface IEntry {
  readonly rank: number | null;
  readonly label: string;
  readonly value: string;
  readonly kind: 'line' | 'whole' | 'band' | 'limit';
  /** Opacity of a band. */
  readonly strength?: number;
}

/** Longer labels use wider columns. */
const SHORT_LABEL = 10;

interface IChip {
  readonly root: HTMLElement;
  readonly value: HTMLElement;
}

/** Legend with the value of each line. A click on a rank shows or hides its line. */
export class Legend {
  readonly root: HTMLElement;
  private chips: IChip[] = [];
  private shape = '';

  constructor(
    private readonly hidden: Set<number>,
    private readonly changed: () => void,
    private readonly translate: Translate
  ) {
    this.root = make('div', 'legend', { role: 'group', 'aria-label': translate('lines') });
  }

  show(entries: readonly IEntry[], near: number): void {
    const shape = entries.map(({ rank, label }) => `${rank} ${label}`).join('|');
    if (shape !== this.shape) {
      const focused = this.chips.findIndex(({ root }) => root === document.activeElement);
      const name = this.shape.split('|')[focused] ?? '';
      this.shape = shape;
      this.build(entries);
      this.chips[shape.split('|').indexOf(name)]?.root.focus(); // the element was replaced
    }
    entries.forEach((entry, i) => this.refresh(this.chips[i]!, entry, near));
  }

  private build(entries: readonly IEntry[]): void {
    this.chips = entries.map(entry => this.chip(entry));
    const isWide = entries.some(({ label }) => label.length > SHORT_LABEL);
    this.root.classList.toggle('nbdist-wide', isWide);
    this.root.replaceChildren(...this.chips.map(chip => chip.root));
  }

  private refresh(chip: IChip, { rank, value }: IEntry, near: number): void {
    setText(chip.value, value);
    if (rank !== null) {
      setAttribute(chip.root, 'aria-pressed', String(!this.hidden.has(rank)));
      chip.root.classList.toggle('nbdist-near', rank === near);
    }
  }

  private chip({ rank, label, kind, strength }: IEntry): IChip {
    const swatch = make('span', `swatch nbdist-swatch-${kind}`, { 'aria-hidden': 'true' });
    if (rank !== null) {
      swatch.style.setProperty('--nbdist-rank', lineColour(rank));
    }
    swatch.style.opacity = String(strength ?? 1);
    const value = make('span', 'chip-value');
    const parts = [swatch, make('span', 'chip-label', {}, label), value];
    if (rank === null) {
      return { root: make('span', 'chip', {}, ...parts), value };
    }
    const title = fill(
      this.translate('Show or hide {0}; Alt-click or Alt-Enter shows it alone'),
      label
    );
    const button = make('button', 'chip', { type: 'button', title }, ...parts);
    button.addEventListener('click', event => this.toggle(rank, event.altKey));
    button.addEventListener('keydown', event => this.key(event, rank));
    return { root: button, value };
  }

  /** Handle Alt-Enter: browsers send no click for it. */
  private key(event: KeyboardEvent, rank: number): void {
    if (event.altKey && event.key === 'Enter') {
      event.preventDefault();
      this.toggle(rank, true);
    }
  }

  private toggle(rank: number, isAlone: boolean): void {
    if (isAlone) {
      this.alone(rank);
    } else if (!this.hidden.delete(rank)) {
      this.hidden.add(rank);
    }
    this.changed();
  }

  /** Hide all other ranks, or show them again if they are hidden. */
  private alone(rank: number): void {
    const ranks = this.shape.split('|').map(part => parseInt(part, 10));
    const others = ranks.filter(other => other >= 0 && other !== rank);
    const areHidden = others.every(other => this.hidden.has(other));
    this.hidden.clear();
    if (!areHidden) {
      others.forEach(other => this.hidden.add(other));
    }
  }
}
