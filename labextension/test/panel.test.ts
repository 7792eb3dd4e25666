import assert from 'node:assert/strict';
import { test } from 'node:test';

import { nullTranslator } from '@jupyterlab/translation';
import { progress } from '../src/panel/words';
import { figures } from '../src/run/figures';
import { RunModel } from '../src/run/model';
import { runState } from './states';

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
