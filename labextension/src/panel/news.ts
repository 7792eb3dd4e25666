import type { TranslationBundle } from '@jupyterlab/translation';
import type { IRunState } from '../records';
import { summaryOf } from '../run/errors';
import type { IFigures } from '../run/figures';
import { RECOVERING, RUN_LOOKS } from '../run/status';
import { duration, recovered } from '../run/words';
import { translateWith } from '../translate';
import type { IRunEvent } from './runevents';
import { progress, runTitle, statusName } from './words';

/** Text of a notification. */
export interface INews {
  readonly title: string;
  readonly body: string;
}

/** Describe an event of a run, as in `Cell 3, fit: finished` and `after 12 min 30 s · loss 0.21`. */
export function newsOf(
  { kind, run }: IRunEvent,
  figures: IFigures,
  trans: TranslationBundle
): INews {
  const words = {
    ended: statusName(run, trans),
    failed: statusName(run, trans),
    recovered: trans.__('recovered'),
    'not finite': trans.__('the loss is not finite')
  };
  return {
    title: `${runTitle(run, trans)}: ${words[kind]}`,
    body: bodyOf(kind, run, figures, trans)
  };
}

function bodyOf(
  kind: IRunEvent['kind'],
  run: IRunState,
  figures: IFigures,
  trans: TranslationBundle
): string {
  const [recovery] = run.heals.slice(-1);
  if (kind === 'recovered' && recovery !== undefined) {
    return recovered(recovery, translateWith(trans));
  }
  if (kind === 'not finite') {
    return run.findings.find(finding => finding.topic === 'nan')?.text ?? '';
  }
  const took = run.ended > 0 ? trans.__('after %1', duration(run.ended - run.began)) : '';
  const parts = [took, kind === 'failed' ? summaryOf(run.error) : progress(figures, trans)];
  return parts.filter(part => part !== '').join(' · ');
}

/** Return the progress of an active run in a few characters: `42 %`, or a sign. */
export function shortProgress(run: IRunState, { step, steps }: IFigures): string {
  if (run.healing !== '') {
    return RECOVERING.sign;
  }
  const part = Math.min(1, step / steps);
  const isKnown = run.status === 'running' && !Number.isNaN(part);
  return isKnown ? `${Math.floor(100 * part)} %` : RUN_LOOKS[run.status].sign;
}
