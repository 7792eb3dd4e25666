import { Disposables, make, setText } from './dom';
import type { LoadMedia } from './mediacard';
import { MediaCard } from './mediacard';
import type { MediaIndex } from './mediaindex';
import type { Translate } from './words';
import { fill } from './words';

/** Largest number of cards. */
const MOST_CARDS = 48;
/** Cards within this distance from the visible area load their content. */
const MARGIN = '200px';

/** Section with the histograms, images, tables and texts of a run. Hidden without contents. */
export class MediaSection {
  readonly root: HTMLDetailsElement;
  private readonly disposables = new Disposables();
  private readonly observer: IntersectionObserver;
  private readonly visible = new Set<Element>();
  private readonly title = make('summary', 'media-title');
  private readonly grid = make('div', 'media-grid');
  private readonly remark = make('p', 'empty');
  private cards: MediaCard[] = [];

  /** @param load missing if the page cannot load contents. */
  constructor(
    private readonly load: LoadMedia | undefined,
    private readonly translate: Translate
  ) {
    this.root = make('details', 'media', { open: '' }, this.title, this.grid, this.remark);
    this.root.hidden = true;
    this.observer = new IntersectionObserver(entries => this.see(entries), { rootMargin: MARGIN });
    this.disposables.add(() => this.observer.disconnect());
    this.disposables.add(() => this.cards.forEach(card => card.dispose()));
  }

  draw(index: MediaIndex): void {
    const all = this.load === undefined ? [] : index.all;
    this.root.hidden = all.length === 0;
    const shown = all.slice(0, MOST_CARDS);
    if (this.cards.some((card, i) => card.series !== shown[i])) {
      this.cards.splice(0).forEach(card => this.drop(card)); // the server sends the run again
    }
    for (const series of shown.slice(this.cards.length)) {
      const card = new MediaCard(series, this.load!, this.translate);
      this.cards.push(card);
      this.grid.append(card.root);
      this.observer.observe(card.root);
    }
    setText(this.title, `${this.translate('Media')} (${all.length})`);
    const more = all.length - shown.length;
    setText(this.remark, fill(this.translate('{0} more are stored, and not shown here.'), more));
    this.remark.hidden = more === 0;
    this.cards.filter(card => this.visible.has(card.root)).forEach(card => card.draw());
  }

  dispose(): void {
    this.disposables.dispose();
  }

  private drop(card: MediaCard): void {
    this.observer.unobserve(card.root);
    this.visible.delete(card.root);
    card.dispose();
  }

  private see(entries: readonly IntersectionObserverEntry[]): void {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) {
        this.visible.add(target);
        this.cards.find(card => card.root === target)?.draw();
      } else {
        this.visible.delete(target);
      }
    }
  }
}
