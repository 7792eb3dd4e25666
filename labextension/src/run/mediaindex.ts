import type { IMediaEntry, MediaKind } from '../records';

/** Contents of one name and kind, by rank. */
export class MediaSeries {
  private readonly byRank = new Map<number, IMediaEntry[]>();

  constructor(
    readonly name: string,
    readonly kind: MediaKind
  ) {}

  /** Add an entry. It replaces one of the same step: a recovered run repeats steps. */
  add(entry: IMediaEntry): void {
    const entries = this.of(entry.rank);
    this.byRank.set(entry.rank, entries);
    const last = entries[entries.length - 1];
    const isNewest = last === undefined || last.step < entry.step || last.epoch < entry.epoch;
    const at = isNewest
      ? -1
      : entries.findIndex(({ step, epoch }) => step === entry.step && epoch === entry.epoch);
    if (at >= 0) {
      entries[at] = entry;
    } else {
      entries.push(entry);
    }
  }

  /** Ranks with contents, ascending. */
  get ranks(): number[] {
    return [...this.byRank.keys()].sort((a, b) => a - b);
  }

  /** Return the entries of a rank, oldest first. */
  of(rank: number): IMediaEntry[] {
    return this.byRank.get(rank) ?? [];
  }
}

/** Index of the histograms, images, tables and texts of a run. */
export class MediaIndex {
  private readonly byKey = new Map<string, MediaSeries>();

  add(entry: IMediaEntry): void {
    const key = `${entry.kind} ${entry.name}`;
    let series = this.byKey.get(key);
    if (series === undefined) {
      series = new MediaSeries(entry.name, entry.kind);
      this.byKey.set(key, series);
    }
    series.add(entry);
  }

  /** All series, in order of arrival. */
  get all(): readonly MediaSeries[] {
    return [...this.byKey.values()];
  }
}
