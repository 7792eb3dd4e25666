import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';
import type { LiveRuns, IWatch } from './live';
import { RUN_ID, RUN_MIME } from './records';
import { RunView } from './run/view';
import { sayWith } from './translate';

const WHOLE_RUN_ID = new RegExp(`^${RUN_ID}$`);

/** Makes what shows outputs of type `RUN_MIME`; before HTML, and in untrusted notebooks too. */
export function rendererFactory(
  runs: LiveRuns,
  trans: TranslationBundle
): IRenderMime.IRendererFactory {
  return {
    safe: true,
    mimeTypes: [RUN_MIME],
    createRenderer: () => new RunOutput(runs, trans)
  };
}

/** An output that follows its run through the Jupyter server, not through the kernel. */
class RunOutput extends Widget implements IRenderMime.IRenderer {
  constructor(
    private readonly runs: LiveRuns,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.addClass('nbdist-RunOutput');
  }

  /** Called for every update of the output: another picture, hardly ever another run. */
  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const id = runId(model.data[RUN_MIME]);
    this.bundle = model;
    if (id !== this.run) {
      this.leave();
      this.run = id;
      if (id !== null) {
        this.follow(this.runs.watch(id));
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

  private follow(watch: IWatch): void {
    const stop = (): void => void watch.stop();
    const view = new RunView(this.node, watch.model, { stop }, sayWith(this.trans));
    const look = (): void => {
      if (watch.model.connection === 'gone') {
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
    const png = text(this.bundle?.data['image/png']);
    const words = text(this.bundle?.data['text/plain']);
    this.node.replaceChildren(png === '' ? preformatted(words) : picture(png, words));
  }

  private bundle: IRenderMime.IMimeModel | null = null;
  private run: string | null = null;
  private view: { dispose(): void } | null = null;
}

/** The id of an output's run; null where a notebook holds something else under the type. */
function runId(data: unknown): string | null {
  if (typeof data !== 'object' || data === null || !('id' in data)) {
    return null;
  }
  return typeof data.id === 'string' && WHOLE_RUN_ID.test(data.id) ? data.id : null;
}

/** What a bundle holds, which a notebook's file may have as a list of lines. */
function text(data: unknown): string {
  return Array.isArray(data) ? data.join('') : typeof data === 'string' ? data : '';
}

function picture(png: string, words: string): HTMLElement {
  const image = document.createElement('img');
  image.src = `data:image/png;base64,${png}`;
  image.alt = words;
  return image;
}

function preformatted(words: string): HTMLElement {
  const lines = document.createElement('pre');
  lines.textContent = words;
  return lines;
}
