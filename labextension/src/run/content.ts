import type { IDataTable, IHistogram, IImage, Media } from '../records';
import { make } from './dom';
import type { Translate } from './words';
import { count, counted, fill, plain } from './words';

/** Size of a histogram in units of its picture. */
const [WIDTH, HEIGHT] = [320, 120];
const SVG = 'http://www.w3.org/2000/svg';
/** Images with a shorter side are enlarged without smoothing. */
const SMALL_PIXELS = 128;

/**
 * Return an element that shows a content.
 *
 * @param words name and step, for screen readers.
 */
export function contentOf(media: Media, words: string, translate: Translate): HTMLElement {
  switch (media.type) {
    case 'histogram':
      return histogram(media, words, translate);
    case 'image':
      return image(media, words);
    case 'table':
      return table(media, words, translate);
    case 'text':
      return make('pre', 'media-text', { tabindex: 0, 'aria-label': words }, media.text);
  }
}

function histogram(found: IHistogram, words: string, translate: Translate): HTMLElement {
  const { edges, mean, deviation, size, not_finite } = found;
  const facts = fill(
    translate('mean {0}, std {1}, {2} values'),
    plain(mean),
    plain(deviation),
    count(size)
  );
  const bad = counted(
    not_finite,
    translate('{0} value is NaN or infinite'),
    translate('{0} values are NaN or infinite')
  );
  const [low, high] = [edges[0]!, edges[edges.length - 1]!];
  const range = fill(translate('from {0} to {1}'), plain(low), plain(high));
  return make(
    'div',
    'histogram',
    {},
    bars(found, `${words}: ${facts}, ${range}`),
    make(
      'div',
      'histogram-range',
      { 'aria-hidden': 'true' },
      make('span', '', {}, plain(low)),
      make('span', '', {}, plain(high))
    ),
    make('div', 'media-facts', {}, facts),
    ...(not_finite > 0 ? [make('div', 'media-bad', {}, bad)] : [])
  );
}

/** Draw the bins of equal width as one path. */
function bars({ counts }: IHistogram, words: string): SVGElement {
  const svg = document.createElementNS(SVG, 'svg');
  const path = document.createElementNS(SVG, 'path');
  const most = Math.max(...counts, 1);
  const wide = WIDTH / counts.length;
  const steps = counts.map((n, i) => {
    const [x, y] = [(i * wide).toFixed(2), (HEIGHT * (1 - n / most)).toFixed(2)];
    return `L${x},${y}h${wide.toFixed(2)}`;
  });
  path.setAttribute('d', `M0,${HEIGHT}${steps.join('')}L${WIDTH},${HEIGHT}Z`);
  svg.setAttribute('viewBox', `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute('preserveAspectRatio', 'none');
  svg.setAttribute('class', 'nbdist-bars');
  svg.setAttribute('role', 'img');
  svg.setAttribute('aria-label', words);
  svg.append(path);
  return svg;
}

function image({ width, height, png }: IImage, words: string): HTMLElement {
  const shown = make('img', 'media-image', {
    src: `data:image/png;base64,${png}`,
    alt: words,
    width,
    height
  });
  shown.classList.toggle('nbdist-media-small', Math.min(width, height) < SMALL_PIXELS);
  return shown;
}

function table(found: IDataTable, words: string, translate: Translate): HTMLElement {
  const { columns, rows, left_out } = found;
  const isNumber = columns.map((_, i) => rows.every(row => isNumeric(row[i])));
  const looks = isNumber.map(number => (number ? 'number' : 'words'));
  const head = columns.map((name, i) => make('th', looks[i]!, { scope: 'col' }, name));
  const body = rows.map(row =>
    make('tr', '', {}, ...row.map((value, i) => make('td', looks[i]!, {}, cell(value))))
  );
  const more = counted(left_out, translate('{0} more row'), translate('{0} more rows'));
  return make(
    'div',
    'scroll nbdist-media-table',
    { role: 'group', 'aria-label': words, tabindex: 0 },
    make(
      'table',
      'data',
      {},
      make('thead', '', {}, make('tr', '', {}, ...head)),
      make('tbody', '', {}, ...body)
    ),
    ...(left_out > 0 ? [make('div', 'media-facts', {}, more)] : [])
  );
}

type Cell = string | number | boolean | null;

function isNumeric(value: Cell | undefined): boolean {
  return typeof value === 'number' || value === null;
}

function cell(value: Cell): string {
  return typeof value === 'number' ? plain(value) : String(value ?? '');
}
