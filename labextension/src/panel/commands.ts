import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';

/** Command ids. Each command describes its own arguments. */
export const Commands = {
  openPanel: 'nbdist:open-panel',
  startCluster: 'nbdist:start-cluster',
  stopCluster: 'nbdist:stop-cluster',
  resizeCluster: 'nbdist:resize-cluster',
  openRun: 'nbdist:open-run',
  openRuns: 'nbdist:open-runs',
  openLatestRun: 'nbdist:open-latest-run',
  openWorker: 'nbdist:open-worker',
  openBoard: 'nbdist:open-tensorboard',
  openPlacement: 'nbdist:open-placement',
  stopRun: 'nbdist:stop-run',
  insertSnippet: 'nbdist:insert-snippet',
  toggleNotifications: 'nbdist:toggle-notifications',
  openExample: 'nbdist:open-example',
  openDocumentation: 'nbdist:open-documentation'
} as const;

/** Return the label of a command, with the name of the product in the palette and in menus. */
export function labelled(text: string): (args: ReadonlyPartialJSONObject) => string {
  return args => (args['isPalette'] === true ? `nbdist: ${text}` : text);
}
