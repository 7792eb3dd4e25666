import { showErrorMessage } from '@jupyterlab/apputils';
import type { ServerConnection } from '@jupyterlab/services';
import { ReactWidget } from '@jupyterlab/ui-components';
import * as React from 'react';
import { Commands } from '../panel/commands';
import type { IAnnotations, IRunRow } from '../records';
import { isOpen } from '../run/status';
import type { ICellsContext } from './cells';
import { showCells, showInNotebook } from './cells';
import { columnsOf } from './columns';
import { csv } from './csv';
import { askForEdit, askForTags, confirmDeletion } from './dialogs';
import { RunsModel } from './model';
import { MOST_CURVES, Overlay } from './overlay';
import type { IQuery } from './query';
import { found, lines } from './query';
import { RunsTable } from './table';
import { RunsToolbar } from './toolbar';

const QUERY: IQuery = {
  search: '',
  status: '',
  tag: '',
  sort: 'started',
  isDescending: true,
  isGrouped: false
};

/** Keys of columns that are hidden at first. */
const HIDDEN: ReadonlySet<string> = new Set(['note']);

/** Table of all stored runs, with a chart of the selected ones. */
export class RunsView extends ReactWidget {
  constructor(
    settings: ServerConnection.ISettings,
    private readonly context: ICellsContext
  ) {
    super();
    this.addClass('nbdist-RunsTab');
    this.model = new RunsModel(settings);
    this.model.changed.connect(() => this.update());
  }

  override dispose(): void {
    this.model.dispose();
    super.dispose();
  }

  protected override render(): React.JSX.Element {
    const { model, context } = this;
    const { rows, failed } = model;
    const { trans } = context;
    return (
      <>
        {failed && (
          <p role="alert" className="nbdist-Error">
            {trans.__('Cannot read the stored runs from the Jupyter server.')}
          </p>
        )}
        {rows !== null && rows.length === 0 && (
          <p>{trans.__('No stored runs yet. Run a cell with %%dist_run.')}</p>
        )}
        {rows !== null && rows.length > 0 && <Workbench {...{ rows, model, context }} />}
      </>
    );
  }

  private readonly model: RunsModel;
}

interface IWorkbenchProps {
  readonly rows: readonly IRunRow[];
  readonly model: RunsModel;
  readonly context: ICellsContext;
}

function Workbench({ rows, model, context }: IWorkbenchProps): React.JSX.Element {
  const { trans } = context;
  const [query, setQuery] = React.useState(QUERY);
  const [hidden, setHidden] = React.useState(HIDDEN);
  const [collapsed, setCollapsed] = React.useState<ReadonlySet<string>>(new Set());
  const [selected, setSelected] = React.useState<readonly string[]>([]);
  const columns = React.useMemo(() => columnsOf(rows, trans), [rows]);
  const matches = React.useMemo(() => found(rows, columns, query), [rows, columns, query]);
  const shown = columns.filter(({ key }) => !hidden.has(key));
  const byId = new Map(rows.map(row => [row.state.id, row]));
  const chosen = selected.flatMap(id => byId.get(id) ?? []);
  const actions = new RunActions(model, context);
  return (
    <>
      <RunsToolbar
        {...{ rows, columns, query, hidden, trans }}
        matches={matches.length}
        selected={chosen.length}
        mostCurves={MOST_CURVES}
        onQuery={change => setQuery({ ...query, ...change })}
        onHide={key => setHidden(toggled(hidden, key))}
        onExport={() => save(csv(chosen.length > 0 ? chosen : matches, shown))}
        onTag={() => void actions.tag(chosen)}
        onDelete={() => void actions.remove(chosen)}
        onClear={() => setSelected([])}
      />
      <RunsTable
        lines={React.useMemo(
          () => lines(matches, query.isGrouped, collapsed),
          [matches, query.isGrouped, collapsed]
        )}
        columns={shown.filter(({ key }) => key !== 'name')}
        selected={chosen.map(({ state }) => state.id)}
        {...{ collapsed, trans }}
        sort={query.sort}
        isDescending={query.isDescending}
        onSort={key => setQuery({ ...query, ...sorted(query, key) })}
        onCollapse={tag => setCollapsed(toggled(collapsed, tag))}
        onSelectAll={isAll => setSelected(isAll ? matches.map(({ state }) => state.id) : [])}
        onSelect={({ state }, isSelected) =>
          setSelected([
            ...selected.filter(id => id !== state.id),
            ...(isSelected ? [state.id] : [])
          ])
        }
        onOpen={row => actions.open(row)}
        onPin={row => void actions.annotate([row], { pinned: !row.annotations.pinned })}
        onEdit={row => void actions.edit(row)}
        onCells={row => void actions.cells(row)}
        onBoard={row => actions.openBoard(row)}
        onNotebook={row => void showInNotebook(row, context)}
      />
      {chosen.length > 0 && <Overlay {...{ model, trans }} rows={chosen} />}
    </>
  );
}

/** Actions on runs. Each one shows the reason if the server refuses it. */
class RunActions {
  constructor(
    private readonly model: RunsModel,
    private readonly context: ICellsContext
  ) {}

  open(row: IRunRow): void {
    void this.context.app.commands.execute(Commands.openRun, { id: row.state.id });
  }

  openBoard(row: IRunRow): void {
    void this.context.app.commands.execute(Commands.openBoard, { id: row.state.id });
  }

  async annotate(rows: readonly IRunRow[], change: Partial<IAnnotations>): Promise<void> {
    await this.shown(async () => {
      for (const { state } of rows) {
        await this.model.annotate(state.id, change);
      }
    });
  }

  async edit(row: IRunRow): Promise<void> {
    const change = await askForEdit(row, this.context.trans);
    if (change !== null) {
      await this.annotate([row], change);
    }
  }

  async tag(rows: readonly IRunRow[]): Promise<void> {
    const tags = await askForTags(rows.length, this.context.trans);
    for (const row of tags === null || tags.length === 0 ? [] : rows) {
      await this.annotate([row], { tags: [...row.annotations.tags, ...(tags ?? [])] });
    }
  }

  /** Delete ended runs after a confirmation. */
  async remove(rows: readonly IRunRow[]): Promise<void> {
    const { trans } = this.context;
    const ended = rows.filter(({ state }) => !isOpen(state.status));
    if (ended.length === 0) {
      await showErrorMessage(trans.__('Cannot delete runs'), trans.__('Stop the run first.'));
    } else if (await confirmDeletion(ended, trans)) {
      await this.shown(async () => {
        for (const { state } of ended) {
          await this.model.remove(state.id);
        }
      });
    }
  }

  async cells(row: IRunRow): Promise<void> {
    await this.shown(async () =>
      showCells(row, await this.model.cells(row.state.id), this.context)
    );
  }

  private async shown(action: () => Promise<void>): Promise<void> {
    try {
      await action();
    } catch (error) {
      await showErrorMessage(this.context.trans.__('nbdist: the request failed'), error as Error);
    }
  }
}

function toggled(set: ReadonlySet<string>, key: string): ReadonlySet<string> {
  return set.has(key) ? new Set([...set].filter(one => one !== key)) : new Set([...set, key]);
}

/** Return the order after a click on a header: first the usual one, then the opposite. */
function sorted(query: IQuery, key: string): Partial<IQuery> {
  return { sort: key, isDescending: query.sort === key ? !query.isDescending : key === 'started' };
}

/** Let the browser save a CSV file. */
function save(text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: 'text/csv' }));
  const link = document.createElement('a');
  link.href = url;
  link.download = 'nbdist-runs.csv';
  link.click();
  URL.revokeObjectURL(url);
}
