import assert from 'node:assert/strict';
import { test } from 'node:test';

import type { ServerConnection } from '@jupyterlab/services';
import { LiveRuns } from '../src/live';
import type { IWatch } from '../src/live';
import { NO_SUCH_RUN, RUN_IS_GONE, UNREADABLE_RUN } from '../src/records';
import { refusal } from '../src/run/words';
import { runState } from './states';

const REASON = 'another version of nbdist wrote its run.json';

Object.assign(globalThis, { window: globalThis });

/** Socket of a page whose server end is the test. */
class Socket {
  static latest: Socket;

  constructor() {
    Socket.latest = this;
  }

  onopen: () => void = () => undefined;
  onmessage: (event: { data: string }) => void = () => undefined;
  onclose: (event: { code: number; reason: string }) => void = () => undefined;

  close(): void {
    this.onclose = () => undefined;
  }
}

/** Follow a run over a socket that has just opened. */
function watch(): IWatch {
  const settings = { wsUrl: 'ws://server/', token: '', WebSocket: Socket };
  const refuse = (): void => assert.fail('no job is stopped');
  const runs = new LiveRuns(settings as unknown as ServerConnection.ISettings, refuse);
  const watched = runs.watch('20000101-000000-000000');
  Socket.latest.onopen();
  return watched;
}

test('the reason for a run that cannot be read reaches its view', () => {
  const { model } = watch();
  let changes = 0;
  model.subscribe(() => changes++);
  Socket.latest.onclose({ code: UNREADABLE_RUN, reason: REASON });
  assert.deepEqual([model.connection, model.reason, changes], ['unreadable', REASON, 1]);
  assert.match(
    refusal(model.reason, text => text),
    /cannot show this run: another version .* delete/
  );
});

test('a missing or deleted run has no reason', () => {
  for (const code of [NO_SUCH_RUN, RUN_IS_GONE]) {
    const { model } = watch();
    Socket.latest.onclose({ code, reason: 'no such run' });
    assert.deepEqual([model.connection, model.reason], ['gone', '']);
  }
});

test('data of a run that became unreadable stays visible', () => {
  const { model } = watch();
  const state = runState({});
  Socket.latest.onmessage({ data: JSON.stringify({ type: 'StateMessage', state }) });
  Socket.latest.onclose({ code: UNREADABLE_RUN, reason: REASON });
  assert.deepEqual([model.state, model.connection], [state, 'unreadable']);
});
