import type { IRecoveryRecord, IRunState } from '../src/records';

/** A run without ranks, begun at second 0 and under way, but for `change`. */
export function runState(change: Partial<IRunState>): IRunState {
  return {
    id: '20000101-000000-000000',
    number: 1,
    label: 1,
    header: '%%dist_run',
    strategy: null,
    framework: '',
    status: 'running',
    began: 0,
    ended: 0,
    workers: [],
    versions: {},
    writer: { host: '', pid: 0, started: 0 },
    request: '',
    cell: '',
    replicas: 0,
    batch: 0,
    samples: -1,
    epochs: 0,
    steps: -1,
    split: '',
    findings: [],
    error: '',
    stoppable: true,
    program: '',
    job: '',
    job_folder: '',
    heals: [],
    healing: '',
    plan: null,
    seed: 7,
    cell_seed: null,
    hyperparameters: {},
    notebook: '',
    signal_steps: 0,
    version: 1,
    name: 'Cell 1, 20:27',
    kind: '',
    ...change
  };
}

/** Rank 2 died after step 7: the run went on after `step`. */
export function recovery(step: number, time_s: number, lost_s = 1.4): IRecoveryRecord {
  return { ranks: [2], reason: 'rank 2 died after step 7\nmore', step, time_s, lost_s, workers: 0 };
}
