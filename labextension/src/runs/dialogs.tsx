import { Dialog, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import * as React from 'react';
import type { IAnnotations, IRunRow } from '../records';
import { nameOf } from './columns';

/** Names that the question about a deletion lists. */
const MOST_NAMES = 5;

type Edit = Pick<IAnnotations, 'name' | 'tags' | 'note'>;

/** Ask for name, tags and note of a run. Returns null if the user cancels. */
export async function askForEdit(row: IRunRow, trans: TranslationBundle): Promise<Edit | null> {
  return ask(trans.__('Edit run'), new EditForm(row, trans), trans.__('Save'), trans);
}

/** Ask for tags to add to runs. Returns null if the user cancels. */
export async function askForTags(
  runs: number,
  trans: TranslationBundle
): Promise<readonly string[] | null> {
  const title = trans._n('Add tags to %1 run', 'Add tags to %1 runs', runs);
  return ask(title, new TagsForm(trans), trans.__('Add'), trans);
}

/** Show a form. Returns its value, or null if the user cancels. */
async function ask<T>(
  title: string,
  body: Dialog.IBodyWidget<T>,
  action: string,
  trans: TranslationBundle
): Promise<T | null> {
  const { button, value } = await showDialog({
    ...{ title, body, focusNodeSelector: 'input' },
    buttons: [
      Dialog.cancelButton({ label: trans.__('Cancel') }),
      Dialog.okButton({ label: action })
    ]
  });
  return button.accept ? value : null;
}

/** Ask whether to delete runs. */
export async function confirmDeletion(
  rows: readonly IRunRow[],
  trans: TranslationBundle
): Promise<boolean> {
  const names = rows.slice(0, MOST_NAMES).map(row => nameOf(row, trans));
  const more = rows.length - names.length;
  const { button } = await showDialog({
    title: trans._n('Delete %1 run?', 'Delete %1 runs?', rows.length),
    body: (
      <div>
        <ul className="nbdist-Names">
          {names.map((name, i) => (
            <li key={i}>{name}</li>
          ))}
          {more > 0 && <li>{trans._n('and %1 more', 'and %1 more', more)}</li>}
        </ul>
        <p>{trans.__('Reports, output and cells are removed from the disk.')}</p>
      </div>
    ),
    defaultButton: 0,
    buttons: [
      Dialog.cancelButton({ label: trans.__('Cancel') }),
      Dialog.warnButton({ label: trans.__('Delete') })
    ]
  });
  return button.accept;
}

/** Return the tags in a text: separated by commas, without repetitions. */
export function tagsIn(text: string): readonly string[] {
  const tags = text.split(',').map(tag => tag.trim());
  return [...new Set(tags.filter(tag => tag !== ''))];
}

class EditForm extends ReactWidget implements Dialog.IBodyWidget<Edit> {
  constructor(
    private readonly row: IRunRow,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.addClass('nbdist-EditForm');
  }

  getValue(): Edit {
    const field = (name: string): string =>
      this.node.querySelector<HTMLInputElement>(`[name=${name}]`)?.value.trim() ?? '';
    return { name: field('name'), tags: tagsIn(field('tags')), note: field('note') };
  }

  protected override render(): React.JSX.Element {
    const { row, trans } = this;
    const { name, tags, note } = row.annotations;
    const unnamed = { ...row, annotations: { ...row.annotations, name: '' } };
    return (
      <>
        <label>
          {trans.__('Name')}
          <input
            name="name"
            className="jp-mod-styled"
            maxLength={200}
            placeholder={nameOf(unnamed, trans)}
            defaultValue={name}
          />
        </label>
        <label>
          {trans.__('Tags, separated by commas')}
          <input name="tags" className="jp-mod-styled" defaultValue={tags.join(', ')} />
        </label>
        <label>
          {trans.__('Note')}
          <textarea
            name="note"
            className="jp-mod-styled"
            rows={5}
            maxLength={20_000}
            defaultValue={note}
          />
        </label>
      </>
    );
  }
}

class TagsForm extends ReactWidget implements Dialog.IBodyWidget<readonly string[]> {
  constructor(private readonly trans: TranslationBundle) {
    super();
    this.addClass('nbdist-EditForm');
  }

  getValue(): readonly string[] {
    return tagsIn(this.node.querySelector('input')?.value ?? '');
  }

  protected override render(): React.JSX.Element {
    return (
      <label>
        {this.trans.__('Tags, separated by commas')}
        <input className="jp-mod-styled" />
      </label>
    );
  }
}
