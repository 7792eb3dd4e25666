import assert from 'node:assert/strict';
import { test } from 'node:test';

import { nullTranslator } from '@jupyterlab/translation';
import type { JSX } from 'react';
import { newsOf, shortProgress } from '../src/panel/news';
import { RunEvents } from '../src/panel/runevents';
import { Runs } from '../src/panel/runs';
import { progress, when } from '../src/panel/words';
import type { IRunState } from '../src/records';
import { figures } from '../src/run/figures';
import { RunModel } from '../src/run/model';
import { recovery, runState } from './states';

const trans = nullTranslator.load('nbdist');

function line(model: RunModel): string {
  return progress(figures(model, 0), trans);
}

test('the line of a run in the panel says what is above its charts', () => {
  const model = new RunModel();
  assert.equal(line(model), '');
  model.onState(runState({ batch: 64, steps: 1200 }));
  model.onTable({
    number: 0,
    columns: { measures: ['step_s'], own: ['loss'], shared: [], system: [] }
  });
  model.onRows(Float64Array.from([0, ...[0, 1, 1, 0, 0.5, 3], ...[0, 1, 2, 0, 1.5, NaN]]));
  assert.equal(line(model), 'step 2 of 1,200 · loss nan (last step) · 64 samples/s');
});

test('a name with the start of the run is not followed by it', () => {
  const now = new Date();
  now.setHours(9, 5, 0, 0);
  const began = now.getTime() / 1000;
  const run = runState({ began, ended: began + 80, name: 'Cell 3, fit, 09:05' });
  assert.equal(when(run), '1 min 20 s');
  assert.equal(when({ ...run, ended: 0 }), '');
  assert.equal(when({ ...run, name: 'wide model' }), '09:05 · 1 min 20 s');
  assert.match(when({ ...run, began: began - 864000, ended: began }), /.+ · /);
});

test('events are ends, failures, recoveries and the first loss that is not finite', () => {
  const events = new RunEvents();
  const kinds = (...runs: ReturnType<typeof runState>[]): string[] =>
    events.take(runs).map(({ kind, run }) => `${run.id} ${kind}`);
  const nan = { topic: 'nan', text: 'nan at step 3', ranks: [], value: 0, warning: true } as const;
  const old = runState({ id: 'old', status: 'failed', ended: 1 });
  assert.deepEqual(kinds(old, runState({ id: 'a' })), []);
  assert.deepEqual(kinds(old, runState({ id: 'a', findings: [nan] })), ['a not finite']);
  assert.deepEqual(kinds(runState({ id: 'a' })), []);
  const recovered = runState({ id: 'a', heals: [recovery(5, 9)], findings: [nan] });
  assert.deepEqual(kinds(recovered), ['a recovered']);
  const ended = runState({ ...recovered, status: 'finished', ended: 12 });
  assert.deepEqual(kinds(ended), ['a ended']);
  assert.deepEqual(kinds(ended), []);
  // Runs that begin and end between two polls.
  const short = runState({ id: 'short', status: 'finished', ended: 2 });
  assert.deepEqual(kinds(ended, short, runState({ id: 'b', status: 'failed', ended: 2 })), [
    'b failed'
  ]);
});

test('a notification names the run, its end and its last loss', () => {
  const model = new RunModel();
  const none = figures(model, 0);
  const last = { ...none, name: 'loss', value: 0.25, definition: 'last step' };
  const run = runState({ status: 'finished', ended: 125, name: 'Cell 3, fit' });
  const ended = newsOf({ kind: 'ended', run }, last, trans);
  assert.equal(ended.title, 'Cell 3, fit: finished');
  assert.equal(ended.body, 'after 2 min 05 s · loss 0.2500 (last step)');
  const failed = runState({ status: 'failed', ended: 3, error: 'ValueError on rank 1@gpu: bad' });
  const failure = newsOf({ kind: 'failed', run: failed }, none, trans);
  assert.equal(failure.title, 'Cell 1, 20:27: failed');
  assert.equal(failure.body, 'after 3 s · ValueError on rank 1@gpu: bad');
  const after = runState({ heals: [recovery(5, 9)] });
  const { body } = newsOf({ kind: 'recovered', run: after }, none, trans);
  assert.equal(body, 'recovered: rank 2 died after step 7, resumed after step 5, 1.4 s lost');
});

test('the title of the page has the share of steps, or a sign', () => {
  const none = figures(new RunModel(), 0);
  assert.equal(shortProgress(runState({}), none), '▶');
  assert.equal(shortProgress(runState({}), { ...none, step: 427, steps: 1000 }), '42 %');
  assert.equal(shortProgress(runState({ healing: 'rank 2' }), { ...none, step: 1, steps: 2 }), '✚');
});

test('a new name appears in an open view', () => {
  const model = new RunModel();
  let changes = 0;
  model.onName('early');
  model.onState(runState({}));
  model.subscribe(() => changes++);
  model.onName('best');
  model.onName('best');
  assert.equal(model.state?.name, 'best');
  assert.equal(changes, 1);
});

/** Return the row of a stopping run in the list, as JSON. */
function stoppingRow(change: Partial<IRunState>): string {
  const run = runState({ status: 'stopping', ...change });
  const list = Runs({
    runs: [run],
    refused: {},
    figuresOf: () => figures(new RunModel(), 0),
    trans,
    onOpen: assert.fail,
    onStop: assert.fail
  });
  const row = (list.props.children as JSX.Element[][])[0]?.[0];
  assert.ok(row !== undefined);
  const draw = row.type as (props: unknown) => JSX.Element;
  return JSON.stringify(draw(row.props));
}

test('the tooltip of the button tells how the run stops', () => {
  assert.match(stoppingRow({}), /"title":"The run stops after the current step"/);
  const ofCell = { stoppable: false };
  assert.match(stoppingRow(ofCell), /"title":"The cell is being interrupted"/);
  assert.match(stoppingRow({ ...ofCell, status: 'running' }), /"title":"Interrupt the cell"/);
  const ofJob = stoppingRow({ program: 'train.py', job_folder: '/shared/train' });
  assert.match(ofJob, /"title":"The job ends. With --checkpoint, it saves its state first."/);
  assert.doesNotMatch(ofJob, /current step/);
});
