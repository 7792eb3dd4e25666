import type { IRunState, IRunWorker } from '../records';
import { Disposables, make, setAttribute, setText } from './dom';
import { summaryOf } from './errors';
import { stepSecondsOf } from './figures';
import type { RunModel } from './model';
import type { ILook } from './status';
import { RANK_LOOKS, rankLook, STRAGGLER } from './status';
import { lineColour } from './theme';
import type { Translate } from './words';
import { amount, count, fill, plain } from './words';

/** Table cell: its text and its sort key. */
interface ICell {
  readonly text: string;
  readonly order: number | string;
}

interface IColumn {
  readonly key: string;
  readonly name: string;
  readonly isNumber: boolean;
  readonly cell: (worker: IRunWorker) => ICell;
}

interface IRow {
  readonly root: HTMLTableRowElement;
  readonly cells: readonly HTMLElement[];
  readonly sign: HTMLElement;
  readonly state: HTMLElement;
}

const UNKNOWN = '–';
/** Key of the first metric's column. Its heading is the name of the metric. */
const METRIC = 'metric';
/** Key of the column of times. Its heading shows whether they are those of steps or of reports. */
const TIME = 'time';

/** Sort order of states: those that need attention come first. */
const TONES: readonly ILook['tone'][] = ['bad', 'calm', 'live', 'good'];

/** Table of the ranks with host and progress. A click on a heading sorts it. */
export class Workers {
  readonly root: HTMLElement;
  private readonly disposables = new Disposables();
  private readonly body = make('tbody', '');
  private readonly heading = make('div', 'heading');
  private readonly columns: readonly IColumn[];
  private readonly heads: readonly HTMLElement[];
  private readonly rows = new Map<number, IRow>();
  private sortBy = 0;
  private isFalling = false;
  private stragglers: ReadonlySet<number> = new Set();

  constructor(
    private readonly model: RunModel,
    private readonly translate: Translate,
    private readonly open: ((rank: number) => void) | null
  ) {
    this.columns = this.allColumns();
    this.heads = this.columns.map((column, i) => this.head(column, i));
    const head = make('thead', '', {}, make('tr', '', {}, ...this.heads));
    const table = make('table', 'workers', {}, head, this.body);
    const region = { role: 'group', 'aria-label': translate('Workers'), tabindex: 0 };
    const scroll = make('div', 'scroll', region, table);
    this.root = make('section', 'section', {}, this.heading, scroll);
    this.mark();
  }

  draw(): void {
    const { state } = this.model;
    const workers = state?.workers ?? [];
    const looks = new Map<ILook, number>();
    this.stragglers = stragglersOf(state);
    for (const worker of workers) {
      const look = this.lookOf(worker);
      looks.set(look, (looks.get(look) ?? 0) + 1);
      this.refresh(worker, look);
    }
    this.drawHeading(workers.length, looks);
    const [metric] = this.model.metrics();
    this.nameColumn(METRIC, metric?.name ?? this.translate('loss'));
    this.nameColumn(TIME, this.translate(this.model.timesReports ? 'ms/report' : 'ms/step'));
    this.order(workers);
  }

  dispose(): void {
    this.disposables.dispose();
  }

  private nameColumn(wanted: string, name: string): void {
    const at = this.columns.findIndex(({ key }) => key === wanted);
    setText(this.heads[at]!.firstChild!, name);
  }

  /** Show the number of workers, and of those with a problem. */
  private drawHeading(workers: number, looks: ReadonlyMap<ILook, number>): void {
    const parts = [fill(this.translate('Workers ({0})'), count(workers))];
    for (const [{ word, tone }, number] of looks) {
      if (tone === 'bad') {
        parts.push(`${count(number)} ${this.translate(word)}`);
      }
    }
    setText(this.heading, parts.join(' · '));
  }

  private lookOf({ rank, status }: IRunWorker): ILook {
    const look = rankLook(status, this.model.state?.status ?? 'running');
    return look === RANK_LOOKS.running && this.stragglers.has(rank) ? STRAGGLER : look;
  }

  private allColumns(): IColumn[] {
    const { translate, model } = this;
    const column = (
      name: string,
      isNumber: boolean,
      cell: IColumn['cell'],
      key = name
    ): IColumn => {
      return { key, name: translate(name), isNumber, cell };
    };
    return [
      column('rank', true, ({ rank }) => numberCell(rank, String)),
      column('host', false, ({ host }) => textCell(host)),
      column('pid', true, ({ pid }) => numberCell(pid, String)),
      column('devices', false, ({ devices }) => textCell(devices)),
      column('step', true, ({ rank }) => numberCell(stepOf(model, rank), count)),
      column('loss', true, ({ rank }) => metricCell(model, rank), METRIC),
      column(
        'ms/step',
        true,
        ({ rank }) => {
          return numberCell(1000 * stepSecondsOf(model, rank), ms => amount(ms, 'short'));
        },
        TIME
      ),
      column('memory', true, ({ rank }) => {
        return numberCell(memoryOf(model, rank), bytes => amount(bytes, 'bytes'));
      }),
      column('state', false, worker => this.stateCell(worker))
    ];
  }

  private stateCell(worker: IRunWorker): ICell {
    const { word, tone } = this.lookOf(worker);
    return { text: this.translate(word), order: TONES.indexOf(tone) };
  }

  private head({ name, isNumber }: IColumn, i: number): HTMLElement {
    const button = make('button', 'sort', { type: 'button' }, name);
    this.disposables.listen(button, 'click', () => this.choose(i));
    return make('th', isNumber ? 'number' : '', { scope: 'col' }, button);
  }

  private choose(i: number): void {
    this.isFalling = this.sortBy === i && !this.isFalling;
    this.sortBy = i;
    this.mark();
    this.draw();
  }

  private mark(): void {
    this.heads.forEach((head, i) => {
      const order = this.isFalling ? 'descending' : 'ascending';
      setAttribute(head, 'aria-sort', i === this.sortBy ? order : 'none');
    });
  }

  private refresh(worker: IRunWorker, look: ILook): void {
    const row = this.rowOf(worker.rank);
    this.columns.forEach((column, i) => {
      if (column.key !== 'state') {
        setText(row.cells[i]!, column.cell(worker).text);
      }
    });
    setText(row.sign, look.sign);
    const error = summaryOf(worker.said);
    setText(row.state, this.translate(look.word) + (error === '' ? '' : `: ${error}`));
    setAttribute(row.state, 'title', error);
    setAttribute(row.root, 'data-tone', look.tone);
  }

  private rowOf(rank: number): IRow {
    let row = this.rows.get(rank);
    if (row === undefined) {
      row = this.newRow(rank);
      this.rows.set(rank, row);
      this.body.append(row.root);
    }
    return row;
  }

  private newRow(rank: number): IRow {
    const sign = make('span', 'sign', { 'aria-hidden': 'true' });
    const state = make('span', '');
    const swatch = make('span', 'swatch', { 'aria-hidden': 'true' });
    swatch.style.setProperty('--nbdist-rank', lineColour(rank));
    const texts = this.columns.map(({ key }) =>
      key === 'rank' ? this.link(rank) : make('span', '')
    );
    const cells = this.columns.map(({ key, isNumber }, i) => {
      const parts =
        key === 'state' ? [sign, state] : key === 'rank' ? [swatch, texts[i]!] : [texts[i]!];
      return key === 'rank'
        ? make('th', 'number', { scope: 'row' }, ...parts)
        : make('td', isNumber ? 'number' : key, {}, ...parts);
    });
    const root = make('tr', this.open === null ? '' : 'opens', {}, ...cells);
    this.disposables.listen(root, 'click', () => this.open?.(rank));
    return { root, cells: texts, sign, state };
  }

  /** Return the element for the rank: a button if the worker has a page. */
  private link(rank: number): HTMLElement {
    const title = fill(this.translate('Open the page of worker {0}'), rank);
    return this.open === null
      ? make('span', '')
      : make('button', 'link', { type: 'button', title });
  }

  /** Sort the rows. Moves them only if the order changed. */
  private order(workers: readonly IRunWorker[]): void {
    const column = this.columns[this.sortBy]!;
    const keyed = workers.map(worker => ({ rank: worker.rank, order: column.cell(worker).order }));
    const sign = this.isFalling ? -1 : 1;
    keyed.sort((a, b) => sign * compare(a.order, b.order) || a.rank - b.rank);
    const roots = keyed.map(({ rank }) => this.rowOf(rank).root);
    const isSame = roots.every((root, i) => this.body.children[i] === root);
    if (!isSame || this.body.children.length !== roots.length) {
      this.body.replaceChildren(...roots);
    }
  }
}

/** Return the ranks reported as stragglers. */
export function stragglersOf(state: IRunState | null): Set<number> {
  const found = state?.findings.filter(finding => finding.topic === 'straggler') ?? [];
  return new Set(found.flatMap(finding => finding.ranks));
}

function textCell(text: string): ICell {
  return { text, order: text };
}

function numberCell(value: number, write: (value: number) => string): ICell {
  return { text: Number.isNaN(value) ? UNKNOWN : write(value), order: value };
}

/** Return the latest value of the first metric, including NaN. */
function metricCell(model: RunModel, rank: number): ICell {
  const [metric] = model.metrics();
  const isKnown = metric !== undefined && (metric.own.has(rank) || metric.shared !== null);
  const value = metric?.latest(rank) ?? NaN;
  return { text: isKnown ? plain(value) : UNKNOWN, order: value };
}

function stepOf(model: RunModel, rank: number): number {
  const step = model.progress(rank)?.step ?? -1;
  return step >= 0 ? step : NaN;
}

function memoryOf(model: RunModel, rank: number): number {
  const device = model.measure('device_bytes')?.own.get(rank)?.lastValue ?? NaN;
  return device > 0 ? device : (model.measure('process_bytes')?.own.get(rank)?.lastValue ?? NaN);
}

/** Compare sort keys. Unknown values come last. */
function compare(a: number | string, b: number | string): number {
  if (typeof a === 'string' || typeof b === 'string') {
    return String(a).localeCompare(String(b));
  }
  if (Number.isNaN(a) || Number.isNaN(b)) {
    return Number(Number.isNaN(a)) - Number(Number.isNaN(b));
  }
  return a - b;
}
