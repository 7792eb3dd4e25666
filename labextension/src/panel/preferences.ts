import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import type { IStateDB } from '@jupyterlab/statedb';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import type { Framework, ISnippet, IStartOptions } from './code';
import { FRAMEWORKS } from './code';

/** Key of the saved start options. Earlier versions wrote it too. */
const KEY = 'nbdist:wish';
const DEFAULT_START_OPTIONS: IStartOptions = { hosts: 4, framework: '' };

/** Settings of the user and the last values of the start form. A page reload restores both. */
export class Preferences {
  constructor(private readonly states: IStateDB | null) {}

  startOptions = DEFAULT_START_OPTIONS;
  snippets: readonly ISnippet[] = [];
  poll_s = 2;
  /** Show notifications of the browser. */
  notifications = false;

  get changed(): ISignal<this, void> {
    return this.signal;
  }

  setStartOptions(startOptions: IStartOptions): void {
    this.startOptions = startOptions;
    this.signal.emit();
    void this.states?.save(KEY, { ...startOptions });
  }

  /** Turn notifications of the browser on or off, for later sessions too. */
  async setNotifications(isOn: boolean): Promise<void> {
    this.notifications = isOn;
    this.signal.emit();
    await this.settings?.set('notifications', isOn);
  }

  /** Load the settings and follow changes. Saved form values take precedence over defaults. */
  async load(registry: ISettingRegistry | null, plugin: string): Promise<void> {
    const settings = await registry?.load(plugin);
    if (settings !== undefined) {
      this.settings = settings;
      settings.changed.connect(this.take, this);
      this.take(settings);
      this.startOptions = {
        ...this.startOptions,
        hosts: settings.get('defaultHosts').composite as number
      };
    }
    this.startOptions = asStartOptions(await this.states?.fetch(KEY)) ?? this.startOptions;
    this.signal.emit();
  }

  private take(settings: ISettingRegistry.ISettings): void {
    this.poll_s = settings.get('pollSeconds').composite as number;
    this.notifications = settings.get('notifications').composite as boolean;
    this.snippets = settings.get('snippets').composite as unknown as readonly ISnippet[];
    this.signal.emit();
  }

  private settings: ISettingRegistry.ISettings | null = null;
  private readonly signal = new Signal<this, void>(this);
}

/** Return the saved form values. Null if they are not valid. */
function asStartOptions(saved: unknown): IStartOptions | null {
  if (typeof saved !== 'object' || saved === null || !('hosts' in saved && 'framework' in saved)) {
    return null;
  }
  const { hosts, framework } = saved;
  const known = FRAMEWORKS.includes(framework as Framework);
  return typeof hosts === 'number' && known ? { hosts, framework: framework as Framework } : null;
}
