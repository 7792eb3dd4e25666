import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';
import type { IClusterState, IWorkerState } from '../records';
import type { Framework, IStartOptions } from './code';
import { FRAMEWORKS } from './code';
import { amount } from '../run/words';
import { clusterTitle, devicesOf, frameworkName } from './words';

const MOST_HOSTS = 1024;

interface IStartProps {
  readonly startOptions: IStartOptions;
  /** Title of the notebook that is to own the cluster. Empty if a new one is opened. */
  readonly notebook: string;
  readonly trans: TranslationBundle;
  readonly onChange: (startOptions: IStartOptions) => void;
  readonly onStart: (startOptions: IStartOptions) => void;
}

/** Form that starts a cluster for the current notebook. */
export function StartForm({
  startOptions,
  notebook,
  trans,
  onChange,
  onStart
}: IStartProps): React.JSX.Element {
  return (
    <form
      className="nbdist-Form"
      aria-label={trans.__('Start cluster')}
      onSubmit={submitted(() => onStart(startOptions))}
    >
      <HostsInput
        label={trans.__('Hosts')}
        hosts={startOptions.hosts}
        onHosts={hosts => onChange({ ...startOptions, hosts })}
      />
      <label>
        {trans.__('Framework')}
        <select
          className="jp-mod-styled"
          value={startOptions.framework}
          onChange={event =>
            onChange({ ...startOptions, framework: event.target.value as Framework })
          }
        >
          {FRAMEWORKS.map(name => (
            <option key={name} value={name}>
              {name === '' ? trans.__('All installed') : frameworkName(name)}
            </option>
          ))}
        </select>
      </label>
      <button type="submit" className="jp-mod-styled jp-mod-accept">
        {trans.__('Start cluster')}
      </button>
      <p>
        {notebook === ''
          ? trans.__('It belongs to a new notebook.')
          : trans.__('It belongs to %1.', notebook)}
      </p>
    </form>
  );
}

interface IClusterProps {
  readonly cluster: IClusterState;
  /** Title of the notebook that owns the cluster. Empty if that notebook is not open. */
  readonly notebook: string;
  readonly trans: TranslationBundle;
  /** Opens the page of a worker. */
  readonly onWorker: (rank: number) => void;
  readonly onArrays: () => void;
  readonly onResize: (hosts: number) => void;
  readonly onStop: () => void;
}

/** One cluster: its workers, and actions that run in its notebook. */
export function Cluster(props: IClusterProps): React.JSX.Element {
  const { cluster, notebook, trans, onWorker, onArrays, onResize, onStop } = props;
  const title = clusterTitle(cluster, trans);
  const [hosts, setHosts] = React.useState(cluster.workers.length);
  const busy = cluster.run !== '';
  const isSame = hosts === cluster.workers.length;
  const refusal = busy ? trans.__('A run is active: stop it first') : '';
  return (
    <section className="nbdist-Cluster" aria-label={title}>
      <h3>{title}</h3>
      <p>
        {notebook === '' ? trans.__('Its notebook is not open.') : notebook}
        {busy && ` · ${trans.__('a run is active')}`}
      </p>
      <Workers workers={cluster.workers} trans={trans} onOpen={onWorker} />
      <button type="button" className="nbdist-Link" onClick={onArrays}>
        {trans.__('Show array placement')}
      </button>
      {notebook !== '' && (
        <form
          className="nbdist-Form"
          aria-label={trans.__('Resize or stop the cluster')}
          onSubmit={submitted(() => onResize(hosts))}
        >
          <HostsInput label={trans.__('Hosts')} hosts={hosts} onHosts={setHosts} />
          <button
            type="submit"
            className="jp-mod-styled"
            title={
              refusal ||
              (isSame
                ? trans.__('The cluster has this number of hosts: enter another one')
                : trans.__('Run %dist_resize in the notebook of the cluster'))
            }
            disabled={busy || isSame}
          >
            {trans.__('Resize')}
          </button>
          <button
            type="button"
            className="jp-mod-styled jp-mod-reject"
            title={refusal || trans.__('Run %dist_stop in the notebook of the cluster')}
            disabled={busy}
            onClick={onStop}
          >
            {trans.__('Stop cluster')}
          </button>
        </form>
      )}
    </section>
  );
}

interface IWorkersProps {
  readonly workers: readonly IWorkerState[];
  readonly trans: TranslationBundle;
  readonly onOpen: (rank: number) => void;
}

function Workers({ workers, trans, onOpen }: IWorkersProps): React.JSX.Element {
  return (
    <div className="nbdist-Scroll" tabIndex={0} role="group" aria-label={trans.__('Workers')}>
      <table>
        <thead>
          <tr>
            <th scope="col">{trans.__('Rank')}</th>
            <th scope="col">{trans.__('State')}</th>
            <th scope="col">{trans.__('Host')}</th>
            <th scope="col">{trans.__('Devices')}</th>
            <th scope="col">{trans.__('Memory')}</th>
          </tr>
        </thead>
        <tbody>
          {workers.map(worker => (
            <tr key={worker.rank} className="nbdist-Opens" onClick={() => onOpen(worker.rank)}>
              <th scope="row">
                <button
                  type="button"
                  className="nbdist-Link"
                  title={trans.__('Open the page of worker %1', worker.rank)}
                >
                  {worker.rank}
                </button>
              </th>
              <td>{worker.state}</td>
              <td title={worker.host}>{worker.host}</td>
              <td title={devicesOf(worker)}>{devicesOf(worker)}</td>
              <td>{worker.memory_bytes > 0 ? amount(worker.memory_bytes, 'bytes') : ''}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

interface IHostsProps {
  readonly label: string;
  readonly hosts: number;
  readonly onHosts: (hosts: number) => void;
}

function HostsInput({ label, hosts, onHosts }: IHostsProps): React.JSX.Element {
  return (
    <label>
      {label}
      <input
        className="jp-mod-styled"
        type="number"
        required
        min={1}
        max={MOST_HOSTS}
        value={Number.isNaN(hosts) ? '' : hosts}
        onChange={event => onHosts(event.target.valueAsNumber)}
      />
    </label>
  );
}

/** Return a submit handler that calls `act` instead of loading a page. */
export function submitted(act: () => void): React.FormEventHandler {
  return event => {
    event.preventDefault();
    act();
  };
}
