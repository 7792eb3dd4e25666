// Colours and movements of the cursor: ECMA-48, section 5.4.
// eslint-disable-next-line no-control-regex
const ESCAPES = /\u001b\[[0-9;?]*[ -/]*[@-~]/g;

/** Return the lines of a terminal's text as it shows them: the last state of progress bars. */
export function terminalLines(text: string): string[] {
  const lines = text.replace(ESCAPES, '').replace(/\r+\n/g, '\n').split('\n');
  return lines.map(line => {
    const end = line.endsWith('\r') ? line.length - 1 : line.length;
    return line.slice(line.lastIndexOf('\r', end - 1) + 1, end);
  });
}

/** Return the lines that contain a text, in upper or lower case. */
export function matching(lines: readonly string[], text: string): string[] {
  const wanted = text.toLowerCase();
  return lines.filter(line => line.toLowerCase().includes(wanted));
}
