/** Command ids. Each command describes its own arguments. */
export const Commands = {
  openPanel: 'nbdist:open-panel',
  startCluster: 'nbdist:start-cluster',
  stopCluster: 'nbdist:stop-cluster',
  resizeCluster: 'nbdist:resize-cluster',
  openRun: 'nbdist:open-run',
  openLatestRun: 'nbdist:open-latest-run',
  openPlacement: 'nbdist:open-placement',
  stopRun: 'nbdist:stop-run',
  insertSnippet: 'nbdist:insert-snippet'
} as const;
