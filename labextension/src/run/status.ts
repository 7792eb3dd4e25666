import type { IRunState, RankStatus, RunStatus } from '../records';

/** Appearance of a status: a sign and a word, so that colour is not required. */
export interface ILook {
  readonly sign: string;
  readonly word: string;
  readonly tone: 'live' | 'good' | 'bad' | 'calm';
}

export const RUN_LOOKS: Readonly<Record<RunStatus, ILook>> = {
  running: { sign: '▶', word: 'running', tone: 'live' },
  stopping: { sign: '◼', word: 'stopping', tone: 'calm' },
  finished: { sign: '✓', word: 'finished', tone: 'good' },
  stopped: { sign: '◼', word: 'stopped', tone: 'calm' },
  failed: { sign: '✕', word: 'failed', tone: 'bad' },
  interrupted: { sign: '◼', word: 'interrupted', tone: 'calm' },
  lost: { sign: '?', word: 'lost: its process is gone', tone: 'bad' }
};

/** Look of a run while ranks are replaced. */
export const RECOVERING: ILook = { sign: '✚', word: 'recovering', tone: 'calm' };

export const RANK_LOOKS: Readonly<Record<RankStatus, ILook>> = {
  running: { sign: '▶', word: 'running', tone: 'live' },
  finished: { sign: '✓', word: 'finished', tone: 'good' },
  failed: { sign: '✕', word: 'failed', tone: 'bad' },
  interrupted: { sign: '◼', word: 'interrupted', tone: 'calm' },
  dead: { sign: '✕', word: 'dead', tone: 'bad' }
};

/** Look of a rank whose state is unknown because the run is lost. */
const RANK_UNKNOWN: ILook = { sign: '?', word: 'unknown', tone: 'bad' };

export const STRAGGLER: ILook = { sign: '▲', word: 'straggler', tone: 'bad' };

/** Return the look of a rank in a run. A stop interrupts the ranks, which is no event of its own. */
export function rankLook(rank: RankStatus, run: RunStatus): ILook {
  if (rank === 'running' && run === 'lost') {
    return RANK_UNKNOWN;
  }
  return rank === 'interrupted' && run === 'stopped' ? RUN_LOOKS.stopped : RANK_LOOKS[rank];
}

/** Return true if the run may still change. */
export function isOpen(status: RunStatus): boolean {
  return status === 'running' || status === 'stopping';
}

/** Return true if the page can stop the run: that of a cell, or of a submitted job. */
export function canStop(state: IRunState): boolean {
  return isOpen(state.status) && (state.program === '' || isJob(state));
}

/** Texts of the button that stops a run. */
export interface IStopWords {
  readonly word: string;
  /** Tooltip. */
  readonly how: string;
  /** Tooltip while the run stops. */
  readonly stopping: string;
}

const STOP_STEPS: IStopWords = {
  word: 'Stop run',
  how: 'Stop the run after the current step',
  stopping: 'The run stops after the current step'
};
const STOP_CELL: IStopWords = {
  word: 'Stop run',
  how: 'Interrupt the cell',
  stopping: 'The cell is being interrupted'
};
const STOP_JOB: IStopWords = {
  word: 'Stop job',
  how: 'Cancel the job. With --checkpoint, it saves its state first.',
  stopping: 'The job ends. With --checkpoint, it saves its state first.'
};

/** Return the texts of the button that stops this run. */
export function stopWords(state: IRunState): IStopWords {
  return isJob(state) ? STOP_JOB : state.stoppable ? STOP_STEPS : STOP_CELL;
}

/** Return true if a submitted job runs the program of the run. */
export function isJob({ job_folder: folder }: IRunState): boolean {
  return folder !== '';
}
