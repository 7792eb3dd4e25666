/** Return the first line of the error of a run or worker: a summary of the exception. */
export function summaryOf(error: string): string {
  return error.split('\n', 1)[0]!;
}
