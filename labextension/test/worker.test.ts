import assert from 'node:assert/strict';
import { test } from 'node:test';

import { matching, terminalLines } from '../src/worker/lines';

test('lines appear as a terminal shows them', () => {
  const text = 'plain\r\n\u001b[1;31mred\u001b[0m\n 10 %\r 20 %\r\nrest';
  assert.deepEqual(terminalLines(text), ['plain', 'red', ' 20 %', 'rest']);
  assert.deepEqual(terminalLines('a\rb\r'), ['b']);
  assert.deepEqual(terminalLines(''), ['']);
});

test('a search ignores the case', () => {
  assert.deepEqual(matching(['Loss 1', 'step', 'the loss'], 'lOSS'), ['Loss 1', 'the loss']);
});
