import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import type { IStateDB } from '@jupyterlab/statedb';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import type { Framework, ISnippet, IWish } from './code';
import { FRAMEWORKS } from './code';

const KEY = 'nbdist:wish';
const FIRST_WISH: IWish = { hosts: 4, framework: '' };

/** Settings of the user and the last values of the start form. A page reload restores both. */
export class Preferences {
  constructor(private readonly states: IStateDB | null) {}

  wish = FIRST_WISH;
  snippets: readonly ISnippet[] = [];
  poll_s = 2;

  get changed(): ISignal<this, void> {
    return this.signal;
  }

  setWish(wish: IWish): void {
    this.wish = wish;
    this.signal.emit();
    void this.states?.save(KEY, { ...wish });
  }

  /** Load the settings and follow changes. Saved form values take precedence over defaults. */
  async load(registry: ISettingRegistry | null, plugin: string): Promise<void> {
    const settings = await registry?.load(plugin);
    if (settings !== undefined) {
      settings.changed.connect(this.take, this);
      this.take(settings);
      this.wish = { ...this.wish, hosts: settings.get('defaultHosts').composite as number };
    }
    this.wish = asWish(await this.states?.fetch(KEY)) ?? this.wish;
    this.signal.emit();
  }

  private take(settings: ISettingRegistry.ISettings): void {
    this.poll_s = settings.get('pollSeconds').composite as number;
    this.snippets = settings.get('snippets').composite as unknown as readonly ISnippet[];
    this.signal.emit();
  }

  private readonly signal = new Signal<this, void>(this);
}

/** Return the saved form values. Null if they are not valid. */
function asWish(saved: unknown): IWish | null {
  if (typeof saved !== 'object' || saved === null || !('hosts' in saved && 'framework' in saved)) {
    return null;
  }
  const { hosts, framework } = saved;
  const known = FRAMEWORKS.includes(framework as Framework);
  return typeof hosts === 'number' && known ? { hosts, framework: framework as Framework } : null;
}
