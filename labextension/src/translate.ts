import type { TranslationBundle } from '@jupyterlab/translation';
import type { Translate } from './run/words';

/** Return the translation of the texts in src/run/. That folder does not import JupyterLab. */
export function translateWith(trans: TranslationBundle): Translate {
  // eslint-disable-next-line jupyter/no-dynamic-translation -- the literals are in src/run/
  return text => trans.__(text);
}
