import type { IRunState, RunStatus } from '../records';
import { isOpen } from '../run/status';

/** Shorter runs that end without an error cause no event. */
const SHORT_S = 10;

export interface IRunEvent {
  readonly kind: 'ended' | 'failed' | 'recovered' | 'not finite';
  readonly run: IRunState;
}

/** What is known of a run from its last state. */
interface ISeen {
  readonly status: RunStatus;
  readonly recoveries: number;
  readonly isFinite: boolean;
}

const NEW: ISeen = { status: 'running', recoveries: 0, isFinite: true };

/** Compare states of runs with their last ones, and return ends, failures and other events. */
export class RunEvents {
  /** Take states. The first call only notes them: what happened before the page was opened is old. */
  take(runs: readonly IRunState[]): IRunEvent[] {
    const events = this.isFirst ? [] : runs.flatMap(run => this.eventsOf(run));
    this.isFirst = false;
    for (const run of runs) {
      this.seen.set(run.id, this.seenNow(run));
    }
    return events;
  }

  private eventsOf(run: IRunState): IRunEvent[] {
    const before = this.seen.get(run.id) ?? NEW;
    const now = this.seenNow(run);
    const events: IRunEvent[] = [];
    if (now.recoveries > before.recoveries) {
      events.push({ kind: 'recovered', run });
    }
    if (before.isFinite && !now.isFinite) {
      events.push({ kind: 'not finite', run });
    }
    if (isOpen(before.status) && !isOpen(now.status)) {
      const isFailure = now.status === 'failed' || now.status === 'lost';
      if (isFailure || run.ended - run.began >= SHORT_S) {
        events.push({ kind: isFailure ? 'failed' : 'ended', run });
      }
    }
    return events;
  }

  /** A finding may be removed later. The run is not finite for good. */
  private seenNow(run: IRunState): ISeen {
    const wasFinite = this.seen.get(run.id)?.isFinite ?? true;
    const isFinite = wasFinite && run.findings.every(finding => finding.topic !== 'nan');
    return { status: run.status, recoveries: run.heals.length, isFinite };
  }

  private isFirst = true;
  private readonly seen = new Map<string, ISeen>();
}
