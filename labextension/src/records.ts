// Made by tools/generate_records.py from nbdist/records: change those, not this.

export const PLACE = ['rank', 'epoch', 'step', 'time_s'] as const;

export const MEASURES = ['step_s', 'input_s', 'collective_s', 'process_bytes', 'device_bytes'] as const;

export const RUN_MIME = 'application/vnd.nbdist.run.v1+json';

export const RUN_ID = '\\d{8}-\\d{6}-[0-9a-f]{6}';

export const NO_SUCH_RUN = 4404;

export const RUN_IS_GONE = 4410;

export type FindingTopic = 'network' | 'straggler' | 'starved' | 'dropped' | 'disk' | 'batch' | 'checkpoint' | 'compiled' | 'nan' | 'strategy';

export type RankStatus = 'running' | 'finished' | 'failed' | 'interrupted' | 'dead';

export type RunStatus = 'running' | 'stopping' | 'finished' | 'stopped' | 'failed' | 'interrupted' | 'lost';

export type StrategyName = 'mirrored' | 'pjrt';

/**
 * A rank of a run.
 *
 * Attributes:
 *     devices: description, such as `2 x cpu`.
 *     said: error of a failed rank; else empty.
 */
export interface RunWorker {
  readonly rank: number;
  readonly host: string;
  readonly pid: number;
  readonly devices: string;
  readonly status: RankStatus;
  readonly said: string;
}

/**
 * The process that writes a run, identified by pid and start.
 *
 * Attributes:
 *     started: seconds from the boot of the machine. Changes of the clock do not affect it.
 */
export interface Writer {
  readonly host: string;
  readonly pid: number;
  readonly started: number;
}

/**
 * A remark about a run. nbdist removes it when it no longer applies.
 *
 * Attributes:
 *     topic: its subject.
 *     text: observation and remedy.
 *     ranks: affected ranks; empty for all.
 *     value: observed share or ratio; 0 if there is none.
 *     warning: the user should act.
 */
export interface Finding {
  readonly topic: FindingTopic;
  readonly text: string;
  readonly ranks: readonly number[];
  readonly value: number;
  readonly warning: boolean;
}

/**
 * A recovery of a run from a loss of ranks.
 *
 * Attributes:
 *     time_s: seconds of the run at the recovery. Reports of repeated steps are later.
 *     ranks: lost ranks.
 *     reason: cause of the loss.
 *     step: last step that was not repeated.
 *     lost_s: seconds from the loss to the next step.
 *     workers: remaining workers if they are fewer than before; else 0.
 */
export interface RecoveryRecord {
  readonly time_s: number;
  readonly ranks: readonly number[];
  readonly reason: string;
  readonly step: number;
  readonly lost_s: number;
  readonly workers: number;
}

/**
 * Cost of a step; None for unknown figures.
 *
 * Attributes:
 *     step_s: seconds between two steps.
 *     collectives: share of `step_s` in collectives alone, from 0 to 1.
 *     arguments: bytes of the arguments on each device.
 *     memory: bytes of arguments and temporaries on each device.
 */
export interface StepFigures {
  readonly step_s: number | null;
  readonly collectives: number | null;
  readonly arguments: number | null;
  readonly memory: number | null;
}

/**
 * Predicted and measured cost of a step.
 *
 * Attributes:
 *     title: layout, such as `data 4 x tensor 2`.
 *     planned: prediction without the memory margin.
 *     measured: measurement over the last steps. Bytes are XLA's, after compilation.
 */
export interface PlanCheck {
  readonly title: string;
  readonly planned: StepFigures;
  readonly measured: StepFigures;
}

/**
 * Content of `run.json`, replaced as a whole at each change.
 *
 * Attributes:
 *     id: id of the run and name of its directory; matches `RUN_ID`.
 *     number: number of the cell in its cluster.
 *     label: execution count of the notebook.
 *     header: the magic's line.
 *     strategy: strategy whose scope the cell ran in; None for no scope.
 *     framework: framework with its version.
 *     status: state of the run.
 *     began: seconds since 1970.
 *     ended: seconds since 1970; 0 while it runs.
 *     replicas: replicas that share a batch; 0 if the cell has no steps.
 *     batch: samples in the first global batch; 0 if the cell has no steps.
 *     samples: samples in an epoch; -1 if unknown.
 *     epochs: epochs of the run; 0 if unknown.
 *     steps: steps of the run; -1 if unknown.
 *     split: description of how data are distributed over ranks.
 *     workers: ranks, in order.
 *     findings: remarks.
 *     error: error of a failed run.
 *     versions: versions of Python and packages, by name.
 *     writer: process that writes the run.
 *     stoppable: Stop ends the run at the end of a step.
 *     request: id of the front end's execution request; empty if unknown.
 *     cell: id of the cell in its notebook; empty if unknown.
 *     recoveries: of lost ranks, `heals` in run.json. Earlier reports of later steps are
 *         superseded. Viewers get this field before the new rows of these steps.
 *     recovering: `healing` in run.json: the reason while ranks are being replaced, else empty.
 *     plan: predicted and measured cost of the steps; None without a plan.
 *     seed: seed of the cluster's random generators; None in runs of older versions.
 *     cell_seed: seed of the generators at the start of the cell (`--seed`); None if not given.
 */
export interface RunState {
  readonly id: string;
  readonly number: number;
  readonly label: number;
  readonly header: string;
  readonly strategy: StrategyName | null;
  readonly framework: string;
  readonly status: RunStatus;
  readonly began: number;
  readonly workers: readonly RunWorker[];
  readonly versions: Readonly<Record<string, string>>;
  readonly writer: Writer;
  readonly ended: number;
  readonly replicas: number;
  readonly batch: number;
  readonly samples: number;
  readonly epochs: number;
  readonly steps: number;
  readonly split: string;
  readonly findings: readonly Finding[];
  readonly error: string;
  readonly stoppable: boolean;
  readonly request: string;
  readonly cell: string;
  readonly heals: readonly RecoveryRecord[];
  readonly healing: string;
  readonly plan: PlanCheck | null;
  readonly seed: number | null;
  readonly cell_seed: number | null;
  readonly version: number;
}

/**
 * Content of an output of type `RUN_MIME`.
 *
 * Attributes:
 *     id: id of the run.
 *     text: summary in one line, for front ends without the extension.
 *     over: the run has ended and the output is final.
 */
export interface RunOutput {
  readonly id: string;
  readonly text: string;
  readonly over: boolean;
}

/**
 * A device of a rank, with the framework's name for it.
 */
export interface Device {
  readonly platform: string;
  readonly kind: string;
  readonly name: string;
  readonly memory_bytes: number | null;
}

/**
 * A rank in `%dist_status`.
 */
export interface WorkerState {
  readonly rank: number;
  readonly host: string;
  readonly pid: number;
  readonly versions: Readonly<Record<string, string>>;
  readonly devices: readonly Device[];
  readonly state: string;
  readonly memory_bytes: number;
}

/**
 * Last output of `%dist_show`. The picture is `placement.html` beside `cluster.json`.
 *
 * Attributes:
 *     names: names in the request.
 *     at: time in seconds since 1970.
 */
export interface ShownPlacement {
  readonly names: readonly string[];
  readonly at: number;
}

/**
 * Content of `cluster.json` while a cluster exists.
 *
 * Attributes:
 *     id: id of the cluster.
 *     frameworks: frameworks of its workers.
 *     workers: ranks, in order.
 *     run: id of the current run; empty between runs.
 *     writer: kernel of the notebook.
 *     kernel: id of the kernel in its Jupyter server; empty without a server.
 *     placement: last output of `%dist_show`; None before the first.
 */
export interface ClusterState {
  readonly id: string;
  readonly frameworks: readonly string[];
  readonly workers: readonly WorkerState[];
  readonly run: string;
  readonly writer: Writer;
  readonly kernel: string;
  readonly placement: ShownPlacement | null;
}

/**
 * State of the run, sent first and at each change.
 */
export interface StateMessage {
  readonly type: 'StateMessage';
  readonly state: RunState;
}

/**
 * Columns of a report after `PLACE`, in this order.
 *
 * Attributes:
 *     measures: measurements, a subset of `MEASURES`.
 *     own: metrics of the rank.
 *     shared: metrics reduced over all ranks, equal on each.
 */
export interface Columns {
  readonly measures: readonly string[];
  readonly own: readonly string[];
  readonly shared: readonly string[];
}

/**
 * An append-only file of rows. Reports with equal columns share a table.
 */
export interface Table {
  readonly number: number;
  readonly columns: Columns;
}

/**
 * Columns of a table, sent before its rows.
 */
export interface TableMessage {
  readonly type: 'TableMessage';
  readonly table: Table;
}

/**
 * Next part of the cell's text output, both streams in order.
 */
export interface TextMessage {
  readonly type: 'TextMessage';
  readonly text: string;
}

/**
 * End of the stored content. The following messages are new.
 */
export interface CaughtUp {
  readonly type: 'CaughtUp';
}

/**
 * Request of a browser to end the run at the end of a step.
 */
export interface StopRun {
  readonly type: 'StopRun';
}

export type ServerMessage = StateMessage | TableMessage | TextMessage | CaughtUp;
