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
export const RANK_UNKNOWN: ILook = { sign: '?', word: 'unknown', tone: 'bad' };

export const STRAGGLER: ILook = { sign: '▲', word: 'straggler', tone: 'bad' };

/** Return true if the run may still change. */
export function isOpen(status: RunStatus): boolean {
  return status === 'running' || status === 'stopping';
}

/** Return true if the page can stop the run: that of a cell, or of a submitted job. */
export function canStop(state: IRunState): boolean {
  return isOpen(state.status) && (state.program === '' || isJob(state));
}

/** Return true if a submitted job runs the program of the run. */
export function isJob({ job_folder: folder }: IRunState): boolean {
  return folder !== '';
}
