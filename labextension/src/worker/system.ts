import type { RunModel } from '../run/model';
import type { ISource } from '../run/sources';
import { MetricSource } from '../run/sources';
import type { Unit } from '../run/words';

interface IQuantity {
  readonly name: string;
  readonly words: string;
  readonly unit: Unit;
}

/** Samples of the hosts in the order of their charts. */
const QUANTITIES: readonly IQuantity[] = [
  { name: 'cpu_cores', words: 'busy cores of the worker', unit: 'number' },
  { name: 'host_cpu', words: 'CPU use of the host', unit: 'share' },
  { name: 'rss_bytes', words: 'memory of the worker', unit: 'bytes' },
  { name: 'host_memory', words: 'used memory of the host', unit: 'share' },
  { name: 'sent_bytes_s', words: 'network: sent', unit: 'bytes/s' },
  { name: 'received_bytes_s', words: 'network: received', unit: 'bytes/s' },
  { name: 'read_bytes_s', words: 'disk: read', unit: 'bytes/s' },
  { name: 'written_bytes_s', words: 'disk: written', unit: 'bytes/s' },
  { name: 'gpu_use', words: 'GPU use', unit: 'share' },
  { name: 'gpu_bytes', words: 'GPU memory', unit: 'bytes' },
  { name: 'gpu_celsius', words: 'GPU temperature (°C)', unit: 'number' },
  { name: 'gpu_watts', words: 'GPU power (W)', unit: 'number' }
];

/** Return one chart per measured quantity of the hosts. */
export function systemSources(model: RunModel): ISource[] {
  return QUANTITIES.flatMap(({ name, words, unit }) => {
    const metric = model.system(name);
    return metric === undefined ? [] : [new MetricSource(metric, words, unit, true)];
  });
}
