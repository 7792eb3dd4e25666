import assert from 'node:assert/strict';
import { test } from 'node:test';

import { brief } from '../src/run/errors';

const IN_USER_CODE = [
  'ValueError: in user code:',
  '',
  '    File "cell 3", line 7, in train_step  *',
  '        y = model(x)',
  '',
  '    ValueError: Input 0 of layer "dense" is incompatible with the layer',
  '',
  ''
].join('\n');
const OF_KERAS = [
  'ValueError on rank 1@here: Exception encountered when calling Sequential.call().',
  '',
  '\u001b[1mInvalid input shape (64, 3).\u001b[0m',
  '',
  'Arguments received by Sequential.call():',
  '  • training=True'
].join('\n');
const OF_AN_OPERATION =
  'InvalidArgumentError: Matrix size-incompatible: [2,3] and [4,5]\n\t [[{{node MatMul}}]] [Op:__inference_f_7]';

for (const [name, error, line] of [
  ['one line stays', 'ValueError: no number', 'ValueError: no number'],
  ['a rank stays, its host does not', 'KeyError on rank 2@a.b:8: x', 'KeyError on rank 2: x'],
  [
    'frames of traced code are left out',
    IN_USER_CODE,
    'ValueError: Input 0 of layer "dense" is incompatible with the layer'
  ],
  [
    'arguments of a Keras layer are left out',
    OF_KERAS,
    'ValueError on rank 1: Invalid input shape (64, 3).'
  ],
  [
    'nodes of a graph are left out',
    OF_AN_OPERATION,
    'InvalidArgumentError: Matrix size-incompatible: [2,3] and [4,5]'
  ],
  ['a text that names no exception ends with its first line', 'rank 2 died\nmore', 'rank 2 died'],
  ['an exception without a text', 'StopIteration: ', 'StopIteration'],
  ['nothing', '', '']
] as const) {
  test(`an error in a line: ${name}`, () => assert.equal(brief(error), line));
}
