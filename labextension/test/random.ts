/** Numbers that look like chance, the same in each run of the tests. */
export class Random {
  constructor(private seed: number) {}

  /** In 0..1. */
  next(): number {
    this.seed = (Math.imul(this.seed, 1664525) + 1013904223) >>> 0;
    return this.seed / 2 ** 32;
  }

  /** A whole number below `end`. */
  below(end: number): number {
    return Math.floor(this.next() * end);
  }

  /** In -1..1. */
  signed(): number {
    return 2 * this.next() - 1;
  }

  shuffle<T>(items: readonly T[]): T[] {
    return items
      .map(item => ({ item, key: this.next() }))
      .sort((a, b) => a.key - b.key)
      .map(({ item }) => item);
  }
}
