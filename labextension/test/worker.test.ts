import assert from 'node:assert/strict';
import { test } from 'node:test';

import type { IWorkerState } from '../src/records';
import { matching, terminalLines } from '../src/worker/lines';
import { runOf } from '../src/worker/subjects';
import { runState } from './states';

test('lines appear as a terminal shows them', () => {
  const text = 'plain\r\n\u001b[1;31mred\u001b[0m\n 10 %\r 20 %\r\nrest';
  assert.deepEqual(terminalLines(text), ['plain', 'red', ' 20 %', 'rest']);
  assert.deepEqual(terminalLines('a\rb\r'), ['b']);
  assert.deepEqual(terminalLines(''), ['']);
});

test('a search ignores the case', () => {
  assert.deepEqual(matching(['Loss 1', 'step', 'the loss'], 'lOSS'), ['Loss 1', 'the loss']);
});

test('the page of a worker shows the run of its cell, else the newest of its process', () => {
  const worker = (state: string, pid = 7): IWorkerState => ({
    ...{ rank: 1, host: 'a', pid, versions: {}, devices: [], state, memory_bytes: 0 }
  });
  const status = 'finished' as const;
  const own = (rank: number, pid: number) => ({
    ...{ rank, host: 'a', pid, devices: '', status, said: '' }
  });
  const runs = [
    runState({ id: 'other', workers: [own(0, 6)] }),
    runState({ id: 'newest', workers: [own(0, 6), own(1, 7)] }),
    runState({ id: 'older', workers: [own(1, 7)] })
  ];
  assert.equal(runOf(worker('busy'), 'active', runs), 'active');
  assert.equal(runOf(worker('idle'), 'active', runs), 'newest'); // the cell runs on other ranks
  assert.equal(runOf(worker('idle'), '', runs), 'newest');
  assert.equal(runOf(worker('idle', 8), '', runs), ''); // a new process after a restart
  assert.equal(runOf(null, '', runs), '');
});
