import { QUANTILES } from './bands';
import { place, valueOf } from './describe';
import { make } from './dom';
import type { Strip } from './decimate';
import type { Picture, ISettings } from './picture';
import type { Translate } from './words';
import { amount, fill } from './words';

const MOST_ROWS = 50;
const MOST_RANKS = 16;

interface IDataColumn {
  readonly name: string;
  readonly strip: Strip;
}

/** Data of a chart as a collapsible table. */
export class DataTable {
  readonly root: HTMLDetailsElement;
  private readonly table: HTMLTableElement;

  constructor(
    private readonly title: string,
    private readonly translate: Translate,
    opened: () => void
  ) {
    const name = fill(translate('Data of {0}'), title);
    this.table = make('table', 'data');
    const region = { role: 'group', 'aria-label': name, tabindex: 0 };
    this.root = make(
      'details',
      'details',
      {},
      make('summary', '', {}, translate('Data')),
      make('div', 'scroll', region, this.table)
    );
    this.root.addEventListener('toggle', opened);
  }

  /** Fill the table if it is open. */
  draw(picture: Picture, settings: ISettings): void {
    if (!this.root.open) {
      return;
    }
    const columns = columnsOf(picture, this.translate);
    const caption = make('caption', '', {}, this.title);
    const isSampled = picture.source.grid.axis === 'second'; // seconds without a sample are no rows
    const places = rowsOf(picture.columns)
      .filter(at => !isSampled || columns.some(({ strip }) => hasValue(strip, at)))
      .map(at => this.row(picture, settings, columns, at));
    const head = [
      settings.x === 'time' ? this.translate('time') : this.translate(picture.source.grid.axis)
    ];
    const cells = [...head, ...columns.map(column => column.name)];
    const names = cells.map(name => make('th', '', { scope: 'col' }, name));
    this.table.replaceChildren(
      caption,
      make('thead', '', {}, make('tr', '', {}, ...names)),
      make('tbody', '', {}, ...places)
    );
  }

  private row(
    picture: Picture,
    settings: ISettings,
    columns: readonly IDataColumn[],
    at: number
  ): HTMLElement {
    const { unit, grid } = picture.source;
    const where = place(picture.x[at]!, grid.axis, settings, this.translate);
    const cells = columns.map(({ strip }) => {
      return make('td', '', {}, hasValue(strip, at) ? amount(valueOf(strip, at), unit) : '');
    });
    return make('tr', '', {}, make('th', '', { scope: 'row' }, where), ...cells);
  }
}

function hasValue(strip: Strip, at: number): boolean {
  return !Number.isNaN(valueOf(strip, at)) || Boolean(strip.bad[at]);
}

/** Return evenly spaced columns of the picture, including the last one. */
function rowsOf(columns: number): number[] {
  const rows = Math.min(columns, MOST_ROWS);
  const apart = rows > 1 ? (columns - 1) / (rows - 1) : 0;
  return Array.from({ length: rows }, (_, i) => Math.round(i * apart));
}

function columnsOf(picture: Picture, translate: Translate): IDataColumn[] {
  const { whole, bands, source } = picture;
  const columns: IDataColumn[] =
    whole === null ? [] : [{ name: translate(source.wholeName), strip: whole }];
  if (bands !== null) {
    const names = [
      translate('min'),
      '10 %',
      '25 %',
      translate('median'),
      '75 %',
      '90 %',
      translate('max')
    ];
    QUANTILES.forEach((_, i) => columns.push({ name: names[i]!, strip: bands.strips[i]! }));
  }
  for (const { rank, strip } of picture.lines.slice(0, MOST_RANKS)) {
    columns.push({ name: `${translate('rank')} ${rank}`, strip });
  }
  return columns;
}
