import type { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';
import type { ITimeline } from '../records';
import { TIMELINE_MIME } from '../records';
import { translateWith } from '../translate';
import { TimelineView } from './view';

/** Create renderers of traces: their HTML, with a timeline that zooms in place of its picture. */
export function timelineFactory(
  registry: IRenderMimeRegistry,
  trans: TranslationBundle
): IRenderMime.IRendererFactory {
  return {
    safe: true,
    mimeTypes: [TIMELINE_MIME],
    createRenderer: () => new TraceOutput(registry, trans)
  };
}

class TraceOutput extends Widget implements IRenderMime.IRenderer {
  constructor(
    private readonly registry: IRenderMimeRegistry,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.addClass('nbdist-TraceOutput');
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    this.clear();
    const html = this.registry.createRenderer('text/html');
    this.html = html;
    await html.renderModel(model);
    if (this.isDisposed || this.html !== html) {
      return;
    }
    const timeline = model.data[TIMELINE_MIME];
    const picture = html.node.querySelector('img');
    if (isTimeline(timeline)) {
      const text = picture?.alt ?? this.trans.__('Timeline');
      this.view = new TimelineView(timeline, text, translateWith(this.trans));
      if (picture === null) {
        html.node.prepend(this.view.root);
      } else {
        picture.replaceWith(this.view.root);
      }
    }
    this.node.replaceChildren(html.node);
  }

  override dispose(): void {
    this.clear();
    super.dispose();
  }

  private clear(): void {
    this.view?.dispose();
    this.html?.dispose();
    this.view = this.html = null;
  }

  private view: TimelineView | null = null;
  private html: IRenderMime.IRenderer | null = null;
}

/** Return true if the data has the form of a timeline: a notebook may contain anything. */
function isTimeline(data: unknown): data is ITimeline {
  return (
    typeof data === 'object' &&
    data !== null &&
    'lanes' in data &&
    'names' in data &&
    Array.isArray(data.names) &&
    Array.isArray(data.lanes) &&
    data.lanes.every(isLane)
  );
}

function isLane(lane: unknown): boolean {
  const fields = ['gaps_us', 'lengths_us', 'names'];
  const values = lane as Readonly<Record<string, unknown>> | null;
  return typeof values === 'object' && fields.every(name => Array.isArray(values?.[name]));
}
