import type { IMediaEntry, Media } from '../records';
import { contentOf } from './content';
import { Disposables, make, setAttribute, setText } from './dom';
import type { MediaSeries } from './mediaindex';
import type { Translate } from './words';
import { count, fill } from './words';

/** Load a content by its number in the index of the run. */
export type LoadMedia = (number: number) => Promise<Media>;

/** Card of one series: its content at a step, which a slider selects. Follows the newest step. */
export class MediaCard {
  readonly root: HTMLElement;
  private readonly disposables = new Disposables();
  private readonly body = make('div', 'media-body');
  private readonly slider = make('input', 'media-slider', { type: 'range', min: 0, value: 0 });
  private readonly place = make('output', 'media-place', { 'aria-hidden': 'true' });
  private readonly ranks = make('select', 'media-rank');
  private follows = true;
  private loading = false;
  /** Entry whose content is shown or being loaded. */
  private shown: IMediaEntry | null = null;

  constructor(
    readonly series: MediaSeries,
    private readonly load: LoadMedia,
    private readonly translate: Translate
  ) {
    const { name } = series;
    const heading = make('span', 'heading', { title: name }, name);
    setAttribute(this.ranks, 'aria-label', fill(translate('Rank of {0}'), name));
    setAttribute(this.slider, 'aria-label', fill(translate('Step of {0}'), name));
    this.disposables.listen(this.ranks, 'change', () => this.draw());
    this.disposables.listen(this.slider, 'input', () => {
      this.follows = this.slider.value === this.slider.max;
      this.draw();
    });
    this.root = make(
      'figure',
      'media-card',
      { 'data-kind': series.kind, 'aria-label': name },
      make('div', 'caption', {}, heading, this.ranks),
      this.body,
      make('div', 'media-steps', {}, this.slider, this.place)
    );
  }

  dispose(): void {
    this.disposables.dispose();
    this.root.remove();
  }

  draw(): void {
    this.drawRanks();
    const entries = this.series.of(Number(this.ranks.value));
    const last = entries.length - 1;
    const at = this.follows ? last : Math.min(Number(this.slider.value), last);
    setAttribute(this.slider, 'max', String(last));
    this.slider.value = String(at);
    this.slider.hidden = last === 0;
    const entry = entries[at];
    if (entry !== undefined) {
      const text = this.placeOf(entry);
      setText(this.place, text);
      setAttribute(this.slider, 'aria-valuetext', text);
      void this.show(entry);
    }
  }

  private drawRanks(): void {
    const { ranks } = this.series;
    if (this.ranks.options.length !== ranks.length) {
      const chosen = this.ranks.value;
      const name = this.translate('rank {0}');
      this.ranks.replaceChildren(
        ...ranks.map(rank => make('option', '', { value: rank }, fill(name, rank)))
      );
      this.ranks.value = ranks.map(String).includes(chosen) ? chosen : String(ranks[0]);
    }
    this.ranks.hidden = ranks.length === 1;
  }

  private placeOf({ step, epoch }: IMediaEntry): string {
    return step >= 0
      ? fill(this.translate('step {0}'), count(step))
      : fill(this.translate('epoch {0}'), count(epoch));
  }

  /** Show a content once it is loaded. One request at a time: the newest is loaded last. */
  private async show(entry: IMediaEntry): Promise<void> {
    if (this.loading || this.shown === entry) {
      return;
    }
    this.loading = true;
    this.shown = entry;
    let content: HTMLElement;
    try {
      const media = await this.load(entry.number);
      const words = `${entry.name}, ${this.placeOf(entry)}`;
      content = contentOf(media, words, this.translate);
    } catch {
      content = make('p', 'empty', {}, this.translate('The content cannot be loaded.'));
    }
    this.body.replaceChildren(content);
    this.loading = false;
    this.draw();
  }
}
