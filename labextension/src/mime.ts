import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';
import type { LiveRuns, IWatch } from './live';
import { RUN_ID, RUN_MIME } from './records';
import { showErrorIn } from './revive/outputs';
import { RunView } from './run/view';
import { refusal } from './run/words';
import { translateWith } from './translate';
import { openWorker } from './worker/tabs';

export { timelineFactory } from './timeline/mime';

const WHOLE_RUN_ID = new RegExp(`^${RUN_ID}$`);

/** Create renderers of `RUN_MIME` outputs, in untrusted notebooks too. */
export function rendererFactory(
  runs: LiveRuns,
  commands: CommandRegistry,
  trans: TranslationBundle
): IRenderMime.IRendererFactory {
  return {
    safe: true,
    mimeTypes: [RUN_MIME],
    createRenderer: () => new RunOutput(runs, commands, trans)
  };
}

/** Output that follows its run through the Jupyter server instead of the kernel. */
class RunOutput extends Widget implements IRenderMime.IRenderer {
  constructor(
    private readonly runs: LiveRuns,
    private readonly commands: CommandRegistry,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.addClass('nbdist-RunOutput');
  }

  /** Render an update of the output. Usually only the picture differs, not the run. */
  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const id = runId(model.data[RUN_MIME]);
    this.bundle = model;
    if (id !== this.run) {
      this.leave();
      this.run = id;
      this.reason = '';
      if (id !== null) {
        this.follow(id, this.runs.watch(id));
      }
    }
    if (this.view === null) {
      this.showPicture();
    }
  }

  override dispose(): void {
    this.leave();
    super.dispose();
  }

  private follow(id: string, watch: IWatch): void {
    const actions = {
      stop: (): Promise<boolean> => watch.stop(),
      showError: (): boolean => showErrorIn(this.node.closest('.jp-OutputArea')),
      openWorker: (rank: number): void => openWorker(this.commands, id, rank),
      loadMedia: watch.loadMedia
    };
    const view = new RunView(this.node, watch.model, actions, translateWith(this.trans));
    const look = (): void => {
      const { state, connection, reason } = watch.model;
      const isRefused = connection === 'unreadable' && state === null;
      if (connection === 'gone' || isRefused) {
        this.reason = isRefused ? refusal(reason, translateWith(this.trans)) : '';
        this.leave();
        this.showPicture();
      }
    };
    const stopListening = watch.model.subscribe(look);
    this.view = {
      dispose: () => {
        stopListening();
        view.dispose();
        watch.dispose();
      }
    };
    look();
  }

  private leave(): void {
    this.view?.dispose();
    this.view = null;
  }

  private showPicture(): void {
    const source = pictureIn(this.bundle?.data ?? {});
    const words = text(this.bundle?.data['text/plain']);
    const shown = source === '' ? preformatted(words) : picture(source, words);
    this.node.replaceChildren(...(this.reason === '' ? [] : [paragraph(this.reason)]), shown);
  }

  private bundle: IRenderMime.IMimeModel | null = null;
  private run: string | null = null;
  /** Text for a run that the server cannot read, else empty. */
  private reason = '';
  private view: { dispose(): void } | null = null;
}

/** Return the run id of an output. Null if the data is not a run. */
function runId(data: unknown): string | null {
  if (typeof data !== 'object' || data === null || !('id' in data)) {
    return null;
  }
  return typeof data.id === 'string' && WHOLE_RUN_ID.test(data.id) ? data.id : null;
}

/** Return the text of a MIME entry. A notebook file may store it as a list of lines. */
function text(data: unknown): string {
  return Array.isArray(data) ? data.join('') : typeof data === 'string' ? data : '';
}

/**
 * Return the picture of an output as a URL of its data. Empty without a picture.
 *
 * It is in HTML, in notebooks of older versions in `image/png`. The HTML may be untrusted: only the
 * picture in it is used.
 */
function pictureIn(data: IRenderMime.IMimeModel['data']): string {
  const png = text(data['image/png']);
  const page = new DOMParser().parseFromString(text(data['text/html']), 'text/html');
  const source = page.querySelector('img')?.getAttribute('src') ?? '';
  const own = png === '' ? source : `data:image/png;base64,${png}`;
  return own.startsWith('data:image/png;base64,') ? own : '';
}

function picture(source: string, words: string): HTMLElement {
  const image = document.createElement('img');
  image.src = source;
  image.alt = words;
  return image;
}

function paragraph(words: string): HTMLElement {
  const line = document.createElement('p');
  line.setAttribute('role', 'alert');
  line.textContent = words;
  return line;
}

function preformatted(words: string): HTMLElement {
  const lines = document.createElement('pre');
  lines.textContent = words;
  return lines;
}
