import type { ILine, ISource } from '../run/sources';

/** The line of one rank in a source. */
class RankSource implements ISource {
  readonly wholeName = '';

  constructor(
    private readonly source: ISource,
    private readonly rank: number
  ) {}

  get key(): string {
    return this.source.key;
  }

  get title(): string {
    return this.source.title;
  }

  get unit(): ISource['unit'] {
    return this.source.unit;
  }

  get isAmount(): boolean {
    return this.source.isAmount;
  }

  get grid(): ISource['grid'] {
    return this.source.grid;
  }

  get lineName(): string {
    return this.source.lineName;
  }

  get limit(): number {
    return this.source.limit;
  }

  lines(): readonly ILine[] {
    return this.source.lines().filter(({ rank }) => rank === this.rank);
  }

  whole(): null {
    return null;
  }
}

/** Return the sources in which a rank has a line, with this line alone. */
export function sourcesOf(rank: number, sources: readonly ISource[]): ISource[] {
  const own = sources.filter(source => source.lines().some(line => line.rank === rank));
  return own.map(source => new RankSource(source, rank));
}
