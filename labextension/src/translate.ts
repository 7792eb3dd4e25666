import type { TranslationBundle } from '@jupyterlab/translation';
import type { Say } from './run/words';

/** Return the translation of the texts in src/run/. That folder does not import JupyterLab. */
export function sayWith(trans: TranslationBundle): Say {
  // eslint-disable-next-line jupyter/no-dynamic-translation -- the literals are in src/run/
  return text => trans.__(text);
}
