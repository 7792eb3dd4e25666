import { MainAreaWidget } from '@jupyterlab/apputils';
import type { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { MimeModel } from '@jupyterlab/rendermime';
import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { LabIcon } from '@jupyterlab/ui-components';
import { ReactWidget } from '@jupyterlab/ui-components';
import { PanelLayout, Widget } from '@lumino/widgets';
import * as React from 'react';
import type { IShownPlacement } from '../records';
import { submitted } from './clusters';
import { showCode } from './code';
import type { IPanelParts } from './panel';
import { LastPlacement } from './placement';
import { moment } from './words';

const HTML = 'text/html';

/** A tab of the main area that shows where the arrays of a cluster are. */
export class PlacementTab extends MainAreaWidget<PlacementContent> {
  constructor(
    readonly subject: string,
    parts: IPanelParts,
    registry: IRenderMimeRegistry,
    icon: LabIcon
  ) {
    const placement = new LastPlacement(parts.server, subject);
    super({ content: new PlacementContent(placement, parts, registry.createRenderer(HTML)) });
    this.toolbar.hide(); // nothing is in it
    this.content.node.setAttribute('aria-label', this.content.title.label);
    this.id = `nbdist-placement-${subject}`;
    this.title.closable = true;
    this.title.icon = icon;
  }
}

/** The picture below the form; its HTML goes through JupyterLab's sanitizer. */
class PlacementContent extends Widget {
  constructor(
    private readonly placement: LastPlacement,
    parts: IPanelParts,
    private readonly picture: IRenderMime.IRenderer
  ) {
    super();
    this.addClass('nbdist-PlacementTab');
    this.title.label = parts.trans.__('Where arrays are');
    const layout = new PanelLayout();
    layout.addWidget(new PlacementHead(placement, parts));
    layout.addWidget(picture);
    this.layout = layout;
    placement.changed.connect(this.draw, this);
    this.draw();
  }

  override dispose(): void {
    this.placement.dispose();
    super.dispose();
  }

  private draw(): void {
    const { shown, html } = this.placement;
    if (shown !== null && shown !== this.drawn) {
      this.drawn = shown;
      this.title.caption = shown.names.join(' ');
      void this.picture.renderModel(new MimeModel({ data: { [HTML]: html }, trusted: false }));
    }
  }

  private drawn: IShownPlacement | null = null;
}

class PlacementHead extends ReactWidget {
  constructor(
    private readonly placement: LastPlacement,
    private readonly parts: IPanelParts
  ) {
    super();
    placement.changed.connect(this.draw, this);
    parts.notebook.changed.connect(this.draw, this);
  }

  protected override render(): React.JSX.Element {
    const { cluster, shown, failed } = this.placement;
    const { notebook, server, trans } = this.parts;
    const kernel = cluster?.kernel ?? '';
    const show = async (names: string): Promise<void> => {
      await notebook.run(showCode(names), kernel);
      await server.refresh();
    };
    return (
      <>
        <NamesForm
          shown={shown?.names.join(' ') ?? ''}
          refusal={refusal(cluster !== undefined, notebook.titleOf(kernel) !== '', trans)}
          trans={trans}
          onShow={names => void show(names)}
        />
        <p>{told(shown, trans)}</p>
        {failed && (
          <p role="alert" className="nbdist-Error">
            {trans.__('The newest one could not be read from the Jupyter server.')}
          </p>
        )}
      </>
    );
  }

  private draw(): void {
    this.update();
  }
}

/** An example of names, in Python. */
const NAMES = 'params model.optimizer';

interface INamesProps {
  /** What was shown last, until something else is typed. */
  readonly shown: string;
  /** Why nothing can be asked for; '' where it can. */
  readonly refusal: string;
  readonly trans: TranslationBundle;
  readonly onShow: (names: string) => void;
}

function NamesForm({ shown, refusal, trans, onShow }: INamesProps): React.JSX.Element {
  const [typed, setTyped] = React.useState<string | null>(null);
  const names = typed ?? shown;
  return (
    <form
      className="nbdist-Form"
      aria-label={trans.__('Show where arrays are')}
      onSubmit={submitted(() => onShow(names))}
    >
      <label>
        {trans.__('Names on the workers')}
        <input
          className="jp-mod-styled"
          type="text"
          required
          pattern=".*\S.*"
          spellCheck={false}
          placeholder={NAMES}
          value={names}
          onChange={event => setTyped(event.target.value)}
        />
      </label>
      <button
        type="submit"
        className="jp-mod-styled jp-mod-accept"
        title={trans.__('Run %dist_show in the notebook of the cluster')}
        disabled={refusal !== ''}
      >
        {trans.__('Show')}
      </button>
      {refusal !== '' && <p>{refusal}</p>}
    </form>
  );
}

function refusal(isThere: boolean, isOpen: boolean, trans: TranslationBundle): string {
  if (!isThere) {
    return trans.__('The cluster is not there now: nothing can be asked of it.');
  }
  return isOpen ? '' : trans.__('Open the notebook of the cluster here to ask from it.');
}

function told(shown: IShownPlacement | null, trans: TranslationBundle): string {
  if (shown === null) {
    return trans.__(
      'Nothing was shown yet. Type names of arrays, variables, pytrees, models or optimizers.'
    );
  }
  const magic = showCode(shown.names.join(' '));
  return trans.__('As %1 showed it at %2', magic, moment(shown.at));
}
