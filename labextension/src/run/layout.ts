import type { ISettings } from './picture';

/** Key of the layout in the browser's storage. */
const KEY = 'nbdist:charts';

interface IStored extends ISettings {
  /** Keys of charts with a logarithmic scale. */
  readonly log: readonly string[];
  /** Keys of charts over the whole width. */
  readonly wide: readonly string[];
}

const DEFAULT: IStored = { x: 'place', smoothing: 0, log: [], wide: [] };

/** Part of `Storage` that the layout needs. */
export type Storage = Pick<globalThis.Storage, 'getItem' | 'setItem'>;

/** Layout of the charts, which the user chose. The browser keeps it for all runs. */
export class Layout implements ISettings {
  private stored: IStored;

  /**
   * @param storage storage of the browser. Null if the page has none: then the layout lasts as long
   *     as the view.
   */
  constructor(private readonly storage: Storage | null) {
    this.stored = this.read();
  }

  get x(): ISettings['x'] {
    return this.stored.x;
  }

  set x(x: ISettings['x']) {
    this.change({ x });
  }

  get smoothing(): number {
    return this.stored.smoothing;
  }

  set smoothing(smoothing: number) {
    this.change({ smoothing });
  }

  has(what: 'log' | 'wide', chart: string): boolean {
    return this.stored[what].includes(chart);
  }

  toggle(what: 'log' | 'wide', chart: string): void {
    const others = this.stored[what].filter(key => key !== chart);
    this.change({ [what]: this.has(what, chart) ? others : [...others, chart] });
  }

  /** Another view may have stored other settings: replace only the changed one. */
  private change(change: Partial<IStored>): void {
    this.stored = { ...this.stored, ...change };
    try {
      this.storage?.setItem(KEY, JSON.stringify({ ...this.read(), ...change }));
    } catch {
      // The storage is full or disabled: the layout lasts as long as the view.
    }
  }

  private read(): IStored {
    try {
      return valid(JSON.parse(this.storage?.getItem(KEY) ?? 'null'));
    } catch {
      return DEFAULT;
    }
  }
}

/** Return the storage of this page. Null if the browser does not allow one. */
export function pageStorage(): Storage | null {
  try {
    return globalThis.localStorage;
  } catch {
    return null;
  }
}

/** Return the stored layout, with defaults for invalid values. */
function valid(read: unknown): IStored {
  const { x, smoothing, log, wide } = (read ?? {}) as Partial<Record<keyof IStored, unknown>>;
  const isWeight = typeof smoothing === 'number' && smoothing >= 0 && smoothing < 1;
  return {
    x: x === 'time' ? 'time' : 'place',
    smoothing: isWeight ? smoothing : 0,
    log: texts(log),
    wide: texts(wide)
  };
}

function texts(read: unknown): string[] {
  return Array.isArray(read) ? read.filter(text => typeof text === 'string') : [];
}
