import type { RankStatus, RunStatus } from '../records';

/** How a status looks: a sign and a word, so that colour is not all there is. */
export interface Look {
  readonly sign: string;
  readonly word: string;
  readonly tone: 'live' | 'good' | 'bad' | 'calm';
}

export const RUN_LOOKS: Readonly<Record<RunStatus, Look>> = {
  running: { sign: '▶', word: 'running', tone: 'live' },
  stopping: { sign: '◼', word: 'stopping', tone: 'calm' },
  finished: { sign: '✓', word: 'finished', tone: 'good' },
  stopped: { sign: '◼', word: 'stopped', tone: 'calm' },
  failed: { sign: '✕', word: 'failed', tone: 'bad' },
  interrupted: { sign: '◼', word: 'interrupted', tone: 'calm' },
  lost: { sign: '?', word: 'lost: the kernel is gone', tone: 'bad' }
};

/** A run of which ranks are being replaced. */
export const RECOVERING: Look = { sign: '✚', word: 'recovering', tone: 'calm' };

export const RANK_LOOKS: Readonly<Record<RankStatus, Look>> = {
  running: { sign: '▶', word: 'running', tone: 'live' },
  finished: { sign: '✓', word: 'finished', tone: 'good' },
  failed: { sign: '✕', word: 'failed', tone: 'bad' },
  interrupted: { sign: '◼', word: 'interrupted', tone: 'calm' },
  dead: { sign: '✕', word: 'dead', tone: 'bad' }
};

/** A rank that ran when the kernel went: nobody knows what became of it. */
export const RANK_UNKNOWN: Look = { sign: '?', word: 'unknown', tone: 'bad' };

export const STRAGGLER: Look = { sign: '▲', word: 'straggler', tone: 'bad' };

/** The run may still change. */
export function isOpen(status: RunStatus): boolean {
  return status === 'running' || status === 'stopping';
}
