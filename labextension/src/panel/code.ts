/** What a cluster is to be made of; every framework that is installed where none is named. */
export interface IWish {
  readonly hosts: number;
  readonly framework: Framework;
}

export type Framework = '' | 'tensorflow' | 'jax';

export const FRAMEWORKS: readonly Framework[] = ['', 'tensorflow', 'jax'];

/** A piece of code to put into a notebook; `{hosts}` in it becomes a number. */
export interface ISnippet {
  readonly label: string;
  readonly code: string;
}

export const STOP_CLUSTER = '%dist_stop';

/** The cell that starts a cluster, in a notebook that may not have loaded nbdist. */
export function startCode(wish: IWish): string {
  return `%load_ext nbdist\n${startLine(wish)}`;
}

/** The cell that gives a cluster another number of hosts. */
export function resizeCode(hosts: number): string {
  return `%dist_resize ${counted(hosts)}`;
}

/** The cell that shows where arrays are; names as typed, with spaces between. */
export function showCode(names: string): string {
  return `%dist_show ${names.trim().split(/\s+/).join(' ')}`;
}

/** A snippet for so many hosts. */
export function filled(snippet: ISnippet, hosts: number): string {
  return snippet.code.replaceAll('{hosts}', String(hosts));
}

function startLine(wish: IWish): string {
  const framework = wish.framework === '' ? '' : ` --framework ${wish.framework}`;
  return `%dist_start ${counted(wish.hosts)}${framework}`;
}

function counted(hosts: number): string {
  return `${hosts} ${hosts === 1 ? 'host' : 'hosts'}`;
}
