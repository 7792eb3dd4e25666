import type { TranslationBundle } from '@jupyterlab/translation';
import type { LabIcon } from '@jupyterlab/ui-components';
import { caretDownIcon, caretRightIcon, codeIcon, editIcon } from '@jupyterlab/ui-components';
import { launchIcon, notebookIcon } from '@jupyterlab/ui-components';
import * as React from 'react';
import type { IRunRow } from '../records';
import { lineColour } from '../run/theme';
import type { IColumn } from './columns';
import { nameOf } from './columns';
import type { Line } from './query';

/** Height of a line in CSS pixels: that of `.nbdist-RunsTable tr`. */
const LINE_HEIGHT = 30;
/** Lines above and below the visible ones that are drawn too. */
const MARGIN_LINES = 8;

/** Actions on the runs of the table. */
export interface IRowActions {
  readonly onOpen: (row: IRunRow) => void;
  readonly onPin: (row: IRunRow) => void;
  readonly onEdit: (row: IRunRow) => void;
  readonly onCells: (row: IRunRow) => void;
  readonly onNotebook: (row: IRunRow) => void;
  readonly onBoard: (row: IRunRow) => void;
  readonly onSelect: (row: IRunRow, isSelected: boolean) => void;
}

interface ITableProps extends IRowActions {
  readonly lines: readonly Line[];
  /** Columns after the name. */
  readonly columns: readonly IColumn[];
  /** Ids of the selected runs, in order of selection. */
  readonly selected: readonly string[];
  readonly sort: string;
  readonly isDescending: boolean;
  readonly collapsed: ReadonlySet<string>;
  readonly trans: TranslationBundle;
  readonly onSort: (key: string) => void;
  readonly onSelectAll: (isSelected: boolean) => void;
  readonly onCollapse: (tag: string) => void;
}

/** Table of runs. Only the lines in view are in the page. */
export function RunsTable(props: ITableProps): React.JSX.Element {
  const { lines, columns, trans } = props;
  const [scrolled, setScrolled] = React.useState({ top: 0, height: 900 });
  const host = React.useRef<HTMLDivElement>(null);
  React.useLayoutEffect(() => {
    const update = (): void => {
      const { scrollTop, clientHeight } = host.current!;
      setScrolled({ top: scrollTop, height: clientHeight });
    };
    const observer = new ResizeObserver(update);
    observer.observe(host.current!);
    host.current!.addEventListener('scroll', update, { passive: true });
    return () => observer.disconnect();
  }, []);
  const first = Math.max(0, Math.floor(scrolled.top / LINE_HEIGHT) - MARGIN_LINES);
  const shown = Math.ceil(scrolled.height / LINE_HEIGHT) + 2 * MARGIN_LINES;
  const visible = lines.slice(first, first + shown);
  return (
    <div ref={host} className="nbdist-RunsScroll">
      <table
        className="nbdist-RunsTable"
        aria-label={trans.__('Stored runs')}
        aria-rowcount={lines.length + 1}
      >
        <Header {...props} />
        <tbody onKeyDown={moveFocus}>
          <Spacer lines={first} />
          {visible.map((line, i) => (
            <TableLine
              key={line.kind === 'run' ? `${line.group} ${line.row.state.id}` : `# ${line.tag}`}
              {...{ ...props, line }}
              index={first + i + 2}
            />
          ))}
          <Spacer lines={lines.length - first - visible.length} />
        </tbody>
      </table>
      {lines.length === 0 && columns.length > 0 && <p>{trans.__('No run matches the filter.')}</p>}
    </div>
  );
}

/** Empty space in place of lines that are out of view. */
function Spacer({ lines }: { readonly lines: number }): React.JSX.Element | null {
  return lines > 0 ? (
    <tr aria-hidden="true" style={{ blockSize: lines * LINE_HEIGHT }} className="nbdist-Spacer" />
  ) : null;
}

function Header(props: ITableProps): React.JSX.Element {
  const { lines, columns, selected, trans, onSelectAll } = props;
  const runs = lines.filter(line => line.kind === 'run');
  const isAll = runs.length > 0 && runs.every(({ row }) => selected.includes(row.state.id));
  return (
    <thead>
      <tr aria-rowindex={1}>
        <SortHeader {...props} sortKey="name" title={trans.__('Name')}>
          <input
            type="checkbox"
            aria-label={trans.__('Select all shown runs')}
            checked={isAll}
            onChange={event => onSelectAll(event.target.checked)}
          />
        </SortHeader>
        {columns.map(column => (
          <SortHeader
            key={`${column.group} ${column.key}`}
            {...props}
            sortKey={column.key}
            title={column.title}
            isNumber={column.isNumber}
          />
        ))}
      </tr>
    </thead>
  );
}

interface ISortProps extends Pick<ITableProps, 'sort' | 'isDescending' | 'onSort'> {
  readonly sortKey: string;
  readonly title: string;
  readonly isNumber?: boolean;
  readonly children?: React.ReactNode;
}

function SortHeader(props: ISortProps): React.JSX.Element {
  const { sort, isDescending, onSort, sortKey, title, isNumber, children } = props;
  const order = sort !== sortKey ? undefined : isDescending ? 'descending' : 'ascending';
  return (
    <th scope="col" aria-sort={order} data-number={isNumber}>
      <div>
        {children}
        <button type="button" title={title} onClick={() => onSort(sortKey)}>
          <span>{title}</span>
          <span aria-hidden="true">{order === undefined ? '' : isDescending ? '▼' : '▲'}</span>
        </button>
      </div>
    </th>
  );
}

interface ILineProps extends ITableProps {
  readonly line: Line;
  /** Position in the table, from 1. The header is the first. */
  readonly index: number;
}

function TableLine(props: ILineProps): React.JSX.Element {
  const { line } = props;
  return line.kind === 'group' ? (
    <GroupLine {...props} tag={line.tag} runs={line.runs} />
  ) : (
    <RunLine {...props} row={line.row} />
  );
}

function GroupLine(
  props: ILineProps & { readonly tag: string; readonly runs: number }
): React.JSX.Element {
  const { tag, runs, index, columns, collapsed, trans, onCollapse } = props;
  const isOpen = !collapsed.has(tag);
  const Caret = isOpen ? caretDownIcon : caretRightIcon;
  return (
    <tr aria-rowindex={index} className="nbdist-Group">
      <th scope="rowgroup" colSpan={columns.length + 1}>
        <button type="button" aria-expanded={isOpen} onClick={() => onCollapse(tag)}>
          <Caret.react tag="span" width="16px" height="16px" />
          {tag === '' ? trans.__('No tag') : tag}
          <span className="nbdist-Count">{runs.toLocaleString()}</span>
        </button>
      </th>
    </tr>
  );
}

function RunLine(props: ILineProps & { readonly row: IRunRow }): React.JSX.Element {
  const { row, index, columns, selected } = props;
  const place = selected.indexOf(row.state.id);
  return (
    <tr aria-rowindex={index} data-selected={place >= 0} data-run={row.state.id}>
      <th scope="row">
        <div>
          <Controls {...props} colour={place < 0 ? '' : lineColour(place)} />
        </div>
      </th>
      {columns.map(column => (
        <td key={`${column.group} ${column.key}`} data-number={column.isNumber}>
          <Cell column={column} row={row} />
        </td>
      ))}
    </tr>
  );
}

interface IControlsProps extends ILineProps {
  readonly row: IRunRow;
  /** Colour of the run in the chart. Empty if it is not selected. */
  readonly colour: string;
}

function Controls(props: IControlsProps): React.JSX.Element {
  const { row, colour, trans, onOpen, onPin, onEdit, onCells, onNotebook, onBoard, onSelect } =
    props;
  const name = nameOf(row, trans);
  const { note, pinned } = row.annotations;
  return (
    <>
      <input
        type="checkbox"
        aria-label={trans.__('Select %1', name)}
        checked={colour !== ''}
        style={colour === '' ? {} : { accentColor: colour }}
        onChange={event => onSelect(row, event.target.checked)}
      />
      <button
        type="button"
        className="nbdist-Pin"
        aria-pressed={pinned}
        aria-label={trans.__('Pin %1', name)}
        title={trans.__('Pinned runs are first and are not deleted automatically')}
        onClick={() => onPin(row)}
      >
        {pinned ? '★' : '☆'}
      </button>
      <button
        type="button"
        className="nbdist-Link"
        title={[name, row.state.header, note].filter(text => text !== '').join('\n')}
        onClick={() => onOpen(row)}
      >
        {name}
      </button>
      <Action icon={editIcon} label={trans.__('Edit %1', name)} onClick={() => onEdit(row)} />
      <Action
        icon={codeIcon}
        label={trans.__('Show the cells of %1', name)}
        onClick={() => onCells(row)}
      />
      <Action
        icon={notebookIcon}
        label={trans.__('Open the notebook of %1', name)}
        isDisabled={row.notebook === '' || row.state.cell === ''}
        onClick={() => onNotebook(row)}
      />
      <Action
        icon={launchIcon}
        label={trans.__('Open %1 in TensorBoard', name)}
        onClick={() => onBoard(row)}
      />
    </>
  );
}

interface IActionProps {
  readonly icon: LabIcon;
  readonly label: string;
  readonly isDisabled?: boolean;
  readonly onClick: () => void;
}

function Action({ icon, label, isDisabled, onClick }: IActionProps): React.JSX.Element {
  return (
    <button
      type="button"
      className="nbdist-Action"
      aria-label={label}
      title={label}
      disabled={isDisabled}
      onClick={onClick}
    >
      <icon.react tag="span" width="16px" height="16px" />
    </button>
  );
}

function Cell({
  column,
  row
}: {
  readonly column: IColumn;
  readonly row: IRunRow;
}): React.ReactNode {
  switch (column.key) {
    case 'status':
      return (
        <span className="nbdist-Status" data-status={row.state.status} title={row.state.error}>
          {column.text(row)}
        </span>
      );
    case 'tag':
      return row.annotations.tags.map(tag => (
        <span key={tag} className="nbdist-Tag">
          {tag}
        </span>
      ));
    default:
      return <span title={column.isNumber ? undefined : column.text(row)}>{column.text(row)}</span>;
  }
}

/** Move the focus to the same control of the line above or below with the arrow keys. */
function moveFocus(event: React.KeyboardEvent<HTMLElement>): void {
  const sibling = { ArrowDown: 'nextElementSibling', ArrowUp: 'previousElementSibling' } as const;
  const line = (event.target as Element).closest('tr');
  if (line === null || !(event.key in sibling)) {
    return;
  }
  const controls = (of: Element): HTMLElement[] => [...of.querySelectorAll<HTMLElement>(CONTROLS)];
  const place = controls(line).indexOf(event.target as HTMLElement);
  const next = line[sibling[event.key as keyof typeof sibling]];
  const found = next === null ? [] : controls(next);
  const control = found[Math.min(place, found.length - 1)];
  if (control !== undefined) {
    event.preventDefault();
    control.focus();
  }
}

const CONTROLS = 'button:not(:disabled), input';
