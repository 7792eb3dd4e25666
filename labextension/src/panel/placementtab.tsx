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

/** Tab of the main area that shows the array placement of a cluster. */
export class PlacementTab extends MainAreaWidget<PlacementContent> {
  constructor(
    readonly subject: string,
    parts: IPanelParts,
    registry: IRenderMimeRegistry,
    icon: LabIcon
  ) {
    const placement = new LastPlacement(parts.server, subject);
    super({ content: new PlacementContent(placement, parts, registry.createRenderer(HTML)) });
    this.toolbar.hide(); // the toolbar is empty
    this.content.node.setAttribute('aria-label', this.content.title.label);
    this.id = `nbdist-placement-${subject}`;
    this.title.closable = true;
    this.title.icon = icon;
  }
}

/** Form and picture of the placement. JupyterLab's sanitizer cleans the HTML. */
class PlacementContent extends Widget {
  constructor(
    private readonly placement: LastPlacement,
    parts: IPanelParts,
    private readonly picture: IRenderMime.IRenderer
  ) {
    super();
    this.addClass('nbdist-PlacementTab');
    this.title.label = parts.trans.__('Array placement');
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
    const { shown, html, stale } = this.placement;
    this.toggleClass('nbdist-mod-stale', stale);
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
    const { cluster, shown, failed, stale } = this.placement;
    const { notebook, server, trans } = this.parts;
    const kernel = cluster?.kernel ?? '';
    const show = async (names: string): Promise<void> => {
      this.isRefused = !(await notebook.run(showCode(names), kernel));
      await server.refresh();
      this.update();
    };
    const refused = refusal(cluster !== undefined, notebook.titleOf(kernel) !== '', trans);
    return (
      <>
        <NamesForm
          shown={shown?.names.join(' ') ?? ''}
          refusal={refused}
          trans={trans}
          onShow={names => void show(names)}
        />
        <p>{caption(shown, trans)}</p>
        {this.isRefused && (
          <p role="alert" className="nbdist-Error">
            {trans.__('The arrays cannot be shown: the last cell of the notebook has the reason.')}
          </p>
        )}
        {shown !== null && stale && cluster !== undefined && (
          <p role="status" className="nbdist-Stale">
            {trans.__('Stale: the workers were replaced. These arrays no longer exist.')}{' '}
            <button
              className="jp-mod-styled"
              title={trans.__('Run %dist_show again')}
              disabled={refused !== ''}
              onClick={() => void show(shown.names.join(' '))}
            >
              {trans.__('Refresh')}
            </button>
          </p>
        )}
        {failed && (
          <p role="alert" className="nbdist-Error">
            {trans.__('Cannot read the latest placement from the Jupyter server.')}
          </p>
        )}
      </>
    );
  }

  /** The last `%dist_show` failed. */
  private isRefused = false;

  private draw(): void {
    this.update();
  }
}

/** Example of names in Python. */
const NAMES = 'params model.optimizer';

interface INamesProps {
  /** Names of the last output: the default of the text field. */
  readonly shown: string;
  /** Reason why the form is disabled. Empty if it is enabled. */
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
      aria-label={trans.__('Show array placement')}
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
    return trans.__('The cluster is not available.');
  }
  return isOpen ? '' : trans.__('Open the notebook of the cluster to run %dist_show.');
}

function caption(shown: IShownPlacement | null, trans: TranslationBundle): string {
  if (shown === null) {
    return trans.__(
      'No placement yet. Enter names of arrays, variables, pytrees, models or optimizers.'
    );
  }
  const magic = showCode(shown.names.join(' '));
  return trans.__('Output of %1 at %2', magic, moment(shown.at));
}
