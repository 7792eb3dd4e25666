/** Exception with an optional rank, and its message: `ValueError on rank 0@host: message`. */
const EXCEPTION = /^([A-Za-z_][\w.]*)( on rank \d+)?(?:@\S+)?:\s([^]*)$/;
/** Lines that frameworks append to a message. */
const APPENDED = /^(\[\[|\[Op:|Arguments received by )/;
// eslint-disable-next-line no-control-regex
const COLOUR = /\u001b\[[\d;]*m/g;

/**
 * Return an error in one line: the type of the exception and the last line of its message.
 *
 * Frameworks put frames of traced code before the message, and arguments or graph nodes after it.
 * A text that names no exception is cut after its first line.
 */
export function brief(error: string): string {
  const text = error.replace(COLOUR, '');
  const [, type, rank = '', message = ''] = EXCEPTION.exec(text) ?? [];
  if (type === undefined) {
    return text.split('\n', 1)[0]!;
  }
  const line = lastLine(message);
  const own = line.startsWith(`${type}: `) ? line.slice(type.length + 2) : line;
  return own === '' ? type + rank : `${type}${rank}: ${own}`;
}

function lastLine(message: string): string {
  const lines = message.split('\n').map(line => line.trim());
  const end = lines.findIndex(line => APPENDED.test(line));
  const own = lines.slice(0, end < 0 ? lines.length : end).filter(line => line !== '');
  return own[own.length - 1] ?? '';
}
