import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';
import type { IRunState } from '../records';
import { summaryOf } from '../run/errors';
import type { IFigures } from '../run/figures';
import { canStop, isOpen, stopWords } from '../run/status';
import { translateWith } from '../translate';
import type { Refused } from './model';
import { progress, runTitle, statusName, when } from './words';

interface IRunsProps {
  readonly runs: readonly IRunState[];
  readonly refused: Refused;
  readonly figuresOf: (id: string) => IFigures;
  readonly trans: TranslationBundle;
  readonly onOpen: (id: string) => void;
  readonly onStop: (id: string) => void;
}

/** List of saved runs, newest first, then of the runs that the server cannot read. */
export function Runs(props: IRunsProps): React.JSX.Element {
  const { runs, refused, trans, onOpen } = props;
  const unreadable = Object.entries(refused);
  if (runs.length + unreadable.length === 0) {
    return <p>{trans.__('No saved runs yet.')}</p>;
  }
  return (
    <ul className="nbdist-Runs">
      {runs.map(run => (
        <Run key={run.id} run={run} {...props} />
      ))}
      {unreadable.map(([id, reason]) => (
        <li key={id}>
          <button type="button" className="nbdist-Link" onClick={() => onOpen(id)}>
            {id}
          </button>
          <span className="nbdist-Status" data-status="lost">
            {trans.__('unreadable')}
          </span>
          <p className="nbdist-Error">{reason}</p>
        </li>
      ))}
    </ul>
  );
}

function Run(props: IRunsProps & { readonly run: IRunState }): React.JSX.Element {
  const { run, figuresOf, trans, onOpen, onStop } = props;
  const title = runTitle(run, trans);
  const { word, how, stopping } = stopWords(run);
  const translate = translateWith(trans);
  const stop = translate(word);
  const workers = trans._n('%1 worker', '%1 workers', run.workers.length);
  return (
    <li>
      <button
        type="button"
        className="nbdist-Link"
        title={run.header}
        onClick={() => onOpen(run.id)}
      >
        {title}
      </button>
      <span className="nbdist-Status" data-status={run.status}>
        {statusName(run, trans)}
      </span>
      <p>{[when(run), workers].filter(part => part !== '').join(' · ')}</p>
      {isOpen(run.status) && (
        <div className="nbdist-Running">
          <span>{progress(figuresOf(run.id), trans)}</span>
          {canStop(run) && (
            <button
              type="button"
              className="jp-mod-styled jp-mod-reject"
              aria-label={`${stop} ${title}`}
              title={translate(run.status === 'running' ? how : stopping)}
              disabled={run.status !== 'running'}
              onClick={() => onStop(run.id)}
            >
              {stop}
            </button>
          )}
          {!canStop(run) && <span>{trans.__('Stop the program where it was started.')}</span>}
        </div>
      )}
      {run.error !== '' && (
        <p className="nbdist-Error nbdist-TwoLines" title={summaryOf(run.error)}>
          {summaryOf(run.error)}
        </p>
      )}
    </li>
  );
}
