import { Disposables, make } from './dom';

/**
 * Line colours that are distinct under colour blindness (after Okabe and Ito, "Color Universal
 * Design", 2008, with the light ones darkened). Each has a contrast of at least 3 on white and on
 * #111.
 */
export const LINE_COLOURS = [
  '#1f77d0',
  '#d55e00',
  '#00906a',
  '#c2619b',
  '#a87b00',
  '#2b93ad',
  '#8a6ad6',
  '#c9504f'
] as const;

/** Return the colour of a rank's line. */
export function lineColour(rank: number): string {
  return LINE_COLOURS[rank % LINE_COLOURS.length] ?? LINE_COLOURS[0];
}

/** Media queries that affect the colours. */
const QUERIES = [
  '(prefers-color-scheme: dark)',
  '(prefers-contrast: more)',
  '(forced-colors: active)'
] as const;

/** Current colours of a chart. */
export interface IColours {
  readonly text: string;
  readonly faint: string;
  readonly grid: string;
  readonly accent: string;
  readonly ground: string;
  readonly error: string;
  readonly font: string;
}

/** Follow the theme of Jupyter, or that of the system. */
export class Theme {
  colours: IColours;
  private readonly disposables = new Disposables();
  private readonly listeners = new Set<() => void>();

  constructor(private readonly host: HTMLElement) {
    this.colours = read(host);
    const observer = new MutationObserver(() => this.readAgain());
    const names = ['class', 'style', 'data-jp-theme-light', 'data-jp-theme-name'];
    for (const element of [document.body, document.documentElement]) {
      observer.observe(element, { attributeFilter: names });
    }
    this.disposables.add(() => observer.disconnect());
    for (const query of QUERIES) {
      this.disposables.listen(matchMedia(query), 'change', () => this.readAgain());
    }
    // The style sheet of a theme may load after its name changes.
    this.disposables.listen(document.head, 'load', () => this.readAgain(), { capture: true });
  }

  onChange(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  dispose(): void {
    this.disposables.dispose();
    this.listeners.clear();
  }

  /** Read the colours again: an element outside the page has none. */
  readAgain(): void {
    this.colours = read(this.host);
    for (const listener of [...this.listeners]) {
      listener();
    }
  }
}

/** Read the computed colours of a probe element, because colours may be mixed or forced. */
function read(host: HTMLElement): IColours {
  const probe = make('span', '', { hidden: '', style: 'forced-color-adjust: none' });
  host.append(probe);
  const style = getComputedStyle(probe);
  const colour = (name: string): string => {
    probe.style.color = `var(--nbdist-${name})`;
    return style.color;
  };
  const colours = {
    text: colour('text'),
    faint: colour('faint'),
    grid: colour('grid'),
    accent: colour('accent'),
    ground: colour('ground'),
    error: colour('error'),
    font: `11px ${style.fontFamily}`
  };
  probe.remove();
  return colours;
}
