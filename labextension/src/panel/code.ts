/** Settings of a new cluster. An empty framework selects all installed ones. */
export interface IStartOptions {
  readonly hosts: number;
  readonly framework: Framework;
}

export type Framework = '' | 'tensorflow' | 'jax';

export const FRAMEWORKS: readonly Framework[] = ['', 'tensorflow', 'jax'];

/** Code that the user can insert into a notebook. `{hosts}` is replaced by a number. */
export interface ISnippet {
  readonly label: string;
  readonly code: string;
}

export const STOP_CLUSTER = '%dist_stop';

/** Return the cell that starts a cluster. It also loads the extension. */
export function startCode(startOptions: IStartOptions): string {
  return `%load_ext nbdist\n${startLine(startOptions)}`;
}

/** Return the cell that changes the number of hosts. */
export function resizeCode(hosts: number): string {
  return `%dist_resize ${counted(hosts)}`;
}

/** Return the cell that shows the placement of arrays. Names are separated by spaces. */
export function showCode(names: string): string {
  return `%dist_show ${names.trim().split(/\s+/).join(' ')}`;
}

/** Return the code of a snippet for a number of hosts. */
export function filled(snippet: ISnippet, hosts: number): string {
  return snippet.code.replaceAll('{hosts}', String(hosts));
}

function startLine(startOptions: IStartOptions): string {
  const framework = startOptions.framework === '' ? '' : ` --framework ${startOptions.framework}`;
  return `%dist_start ${counted(startOptions.hosts)}${framework}`;
}

function counted(hosts: number): string {
  return `${hosts} ${hosts === 1 ? 'host' : 'hosts'}`;
}
