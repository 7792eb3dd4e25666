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
 *     devices: in words, as in `2 x cpu`.
 *     said: of a rank that failed, its error.
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
 * The process that keeps a run: its start tells it from a later process of the same pid.
 *
 * Attributes:
 *     started: seconds after the machine came up: the same however its clock is set later.
 */
export interface Writer {
  readonly host: string;
  readonly pid: number;
  readonly started: number;
}

/**
 * Something about a run that is worth a line; one that no longer holds is taken away.
 *
 * Attributes:
 *     topic: what it is about.
 *     text: what was seen, and what to type.
 *     ranks: whom it is about; empty where it is all.
 *     value: the share or the ratio that was seen; 0 where there is none.
 *     warning: whether something should be done.
 */
export interface Finding {
  readonly topic: FindingTopic;
  readonly text: string;
  readonly ranks: readonly number[];
  readonly value: number;
  readonly warning: boolean;
}

/**
 * Ranks were lost, and the run went on without the user.
 *
 * Attributes:
 *     time_s: of the run, when it did: all that is reported of the steps after has a later time.
 *     ranks: those that were lost.
 *     reason: what became of them.
 *     step: the last one that it had not to make again.
 *     lost_s: from the loss on, until steps were made again.
 *     workers: how many went on, where they are fewer than before; else 0.
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
 * What a step takes; None is what is not known, or not yet.
 *
 * Attributes:
 *     step_s: seconds between two steps.
 *     collectives: the share of them that is spent in collectives, and in nothing else.
 *     arguments: bytes on each device of what the step is given.
 *     memory: the same with what it makes on its way.
 */
export interface StepFigures {
  readonly step_s: number | null;
  readonly collectives: number | null;
  readonly arguments: number | null;
  readonly memory: number | null;
}

/**
 * What the plan of a step has foretold, and what came of it.
 *
 * Attributes:
 *     title: of the layout, as in `data 4 x tensor 2`.
 *     planned: without the margin for what nobody can foretell.
 *     measured: over the last steps; bytes are those that XLA counts, once it has compiled.
 */
export interface PlanCheck {
  readonly title: string;
  readonly planned: StepFigures;
  readonly measured: StepFigures;
}

/**
 * What `run.json` holds; replaced as a whole whenever it changes.
 *
 * Attributes:
 *     id: names the run's directory; matches `RUN_ID`.
 *     number: of the cell within its cluster.
 *     label: the notebook's execution count.
 *     header: the magic's line, as typed.
 *     strategy: whose scope the cell ran in; None where it ran in none.
 *     framework: in words, with its version.
 *     status: how it is.
 *     began: seconds since 1970.
 *     ended: seconds since 1970; 0 while it runs.
 *     replicas: how many share a batch; 0 where the cell is no step.
 *     batch: samples in the first global batch; 0 where the cell is no step.
 *     samples: samples in an epoch; -1 where nobody knows.
 *     epochs: how many there will be; 0 where nobody knows.
 *     steps: steps of the whole run; -1 where nobody knows.
 *     split: how the data come to the ranks, in words.
 *     workers: the ranks, in their order.
 *     findings: what is worth a line.
 *     error: of a run that failed, the one that ended it.
 *     versions: of what ran, by name.
 *     writer: who keeps it.
 *     stoppable: whether Stop ends it at the end of a step.
 *     request: id of the front end's request to run the cell; empty where there was none.
 *     cell: the cell's id in its notebook; empty where the front end has not told.
 *     recoveries: of lost ranks, `heals` in run.json. Earlier reports of later steps are
 *         superseded. Whoever watches is told before the rows that stand for these.
 *     recovering: `healing` in run.json: the reason while ranks are being replaced, else empty.
 *     plan: what was foretold of the steps, and what came of it; None where nothing was planned.
 *     seed: of the cluster's random generators when it started; None in runs of older versions.
 *     cell_seed: of the generators when the cell began (`--seed`); None if not given.
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
 * What an output of type `RUN_MIME` holds: where to look, and what to say until then.
 *
 * Attributes:
 *     id: the run's.
 *     text: the run in a line.
 *     over: it has ended; what is shown will not change.
 */
export interface RunOutput {
  readonly id: string;
  readonly text: string;
  readonly over: boolean;
}

/**
 * A device that a rank drives, as its framework names it.
 */
export interface Device {
  readonly platform: string;
  readonly kind: string;
  readonly name: string;
  readonly memory_bytes: number | null;
}

/**
 * A rank, as `%dist_status` shows it.
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
 * What `%dist_show` showed last; the picture is in `placement.html`, beside `cluster.json`.
 *
 * Attributes:
 *     names: as asked for.
 *     at: when, in seconds since 1970.
 */
export interface ShownPlacement {
  readonly names: readonly string[];
  readonly at: number;
}

/**
 * What `cluster.json` holds while a cluster is there.
 *
 * Attributes:
 *     id: names it.
 *     frameworks: what its workers load.
 *     workers: the ranks, in their order.
 *     run: the run that is under way; empty between runs.
 *     writer: the notebook's kernel.
 *     kernel: the kernel's id within its Jupyter server; empty where there is none.
 *     placement: where arrays were when somebody last looked; None until then.
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
 * How the run is; sent first, and whenever it changes.
 */
export interface StateMessage {
  readonly type: 'StateMessage';
  readonly state: RunState;
}

/**
 * What a report holds after its `PLACE`, in this order.
 *
 * Attributes:
 *     measures: what nbdist measured, of `MEASURES`.
 *     own: metrics of the rank's own.
 *     shared: metrics reduced over all ranks, the same on each.
 */
export interface Columns {
  readonly measures: readonly string[];
  readonly own: readonly string[];
  readonly shared: readonly string[];
}

/**
 * One append-only file of rows; reports with the same columns are in one table.
 */
export interface Table {
  readonly number: number;
  readonly columns: Columns;
}

/**
 * A table's columns; sent before its rows.
 */
export interface TableMessage {
  readonly type: 'TableMessage';
  readonly table: Table;
}

/**
 * What the cell shows as text, on from what was sent; of both streams in their order.
 */
export interface TextMessage {
  readonly type: 'TextMessage';
  readonly text: string;
}

/**
 * All that the run had when the browser came has been sent; what follows is new.
 */
export interface CaughtUp {
  readonly type: 'CaughtUp';
}

/**
 * What a browser may say: end the run at the end of a step.
 */
export interface StopRun {
  readonly type: 'StopRun';
}

export type ServerMessage = StateMessage | TableMessage | TextMessage | CaughtUp;
