import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';
import { statusName } from '../panel/words';
import type { IRunRow } from '../records';
import { count } from '../run/words';
import type { IColumn } from './columns';
import type { IQuery } from './query';
import { tagsOf } from './query';

interface IToolbarProps {
  readonly rows: readonly IRunRow[];
  readonly columns: readonly IColumn[];
  readonly query: IQuery;
  /** Keys of hidden columns. */
  readonly hidden: ReadonlySet<string>;
  /** Number of runs that match the filter. */
  readonly matches: number;
  /** Number of selected runs. */
  readonly selected: number;
  /** Largest number of runs in the chart. */
  readonly mostCurves: number;
  readonly trans: TranslationBundle;
  readonly onQuery: (change: Partial<IQuery>) => void;
  readonly onHide: (key: string) => void;
  readonly onExport: () => void;
  readonly onTag: () => void;
  readonly onDelete: () => void;
  readonly onClear: () => void;
}

/** Filter of the table and actions on the selected runs. */
export function RunsToolbar(props: IToolbarProps): React.JSX.Element {
  const { rows, matches, selected, mostCurves, trans } = props;
  return (
    <div className="nbdist-RunsBar">
      <Filters {...props} />
      <span role="status">
        {matches === rows.length
          ? trans._n('%1 run', '%1 runs', rows.length)
          : trans.__('%1 of %2 runs', count(matches), count(rows.length))}
        {selected > 0 && ` · ${trans.__('%1 selected', count(selected))}`}
        {selected > mostCurves && ` · ${trans.__('the chart shows the first %1', mostCurves)}`}
      </span>
      <span className="nbdist-Actions">
        {selected > 0 && (
          <>
            <Button label={trans.__('Add tags…')} onClick={props.onTag} />
            <Button label={trans.__('Delete…')} onClick={props.onDelete} />
            <Button label={trans.__('Clear selection')} onClick={props.onClear} />
          </>
        )}
        <Button label={trans.__('Export CSV')} onClick={props.onExport} />
      </span>
    </div>
  );
}

function Filters(props: IToolbarProps): React.JSX.Element {
  const { rows, query, trans, onQuery } = props;
  const statuses = new Map(rows.map(({ state }) => [state.status, statusName(state, trans)]));
  const tags = tagsOf(rows);
  return (
    <>
      <input
        type="search"
        className="jp-mod-styled"
        aria-label={trans.__('Search runs')}
        placeholder={trans.__('Search, or loss<0.5 tag=baseline')}
        title={trans.__('Words, and conditions on columns: loss<0.5 batch>=64 tag=baseline')}
        spellCheck={false}
        value={query.search}
        onChange={event => onQuery({ search: event.target.value })}
      />
      <Filter
        label={trans.__('Filter by status')}
        all={trans.__('All statuses')}
        choices={[...statuses]}
        value={query.status}
        onChange={status => onQuery({ status })}
      />
      <Filter
        label={trans.__('Filter by tag')}
        all={trans.__('All tags')}
        choices={tags.map(tag => [tag, tag])}
        value={query.tag}
        onChange={tag => onQuery({ tag })}
      />
      <label>
        <input
          type="checkbox"
          checked={query.isGrouped}
          onChange={event => onQuery({ isGrouped: event.target.checked })}
        />
        {trans.__('Group by tag')}
      </label>
      <ColumnChoice {...props} />
    </>
  );
}

function ColumnChoice({ columns, hidden, trans, onHide }: IToolbarProps): React.JSX.Element {
  const titles: Readonly<Record<IColumn['group'], string>> = {
    run: trans.__('Run'),
    metric: trans.__('Metrics'),
    hyperparameter: trans.__('Hyperparameters')
  };
  const groups = Object.entries(titles).map(([group, title]) => ({
    title,
    own: columns.filter(column => column.group === group && column.key !== 'name')
  }));
  return (
    <details className="nbdist-Columns">
      <summary>{trans.__('Columns')}</summary>
      <div>
        {groups
          .filter(({ own }) => own.length > 0)
          .map(({ title, own }) => (
            <fieldset key={title}>
              <legend>{title}</legend>
              {own.map(column => (
                <label key={column.key}>
                  <input
                    type="checkbox"
                    checked={!hidden.has(column.key)}
                    onChange={() => onHide(column.key)}
                  />
                  {column.title}
                </label>
              ))}
            </fieldset>
          ))}
      </div>
    </details>
  );
}

interface IButtonProps {
  readonly label: string;
  readonly onClick: () => void;
}

function Button({ label, onClick }: IButtonProps): React.JSX.Element {
  return (
    <button type="button" className="jp-mod-styled nbdist-Small" onClick={onClick}>
      {label}
    </button>
  );
}

/** Choice of one value of a column, or of all. */
function Filter({
  label,
  all,
  choices,
  value,
  onChange
}: {
  readonly label: string;
  readonly all: string;
  readonly choices: readonly (readonly [value: string, name: string])[];
  readonly value: string;
  readonly onChange: (value: string) => void;
}): React.JSX.Element {
  return (
    <select
      className="jp-mod-styled"
      aria-label={label}
      value={value}
      onChange={event => onChange(event.target.value)}
    >
      <option value="">{all}</option>
      {choices.map(([choice, name]) => (
        <option key={choice} value={choice}>
          {name}
        </option>
      ))}
    </select>
  );
}
