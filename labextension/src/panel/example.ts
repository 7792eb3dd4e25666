import type { JupyterFrontEnd } from '@jupyterlab/application';
import { InputDialog } from '@jupyterlab/apputils';
import { PathExt, URLExt } from '@jupyterlab/coreutils';
import type { Contents } from '@jupyterlab/services';
import { ServerConnection } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { Framework } from './code';
import { FRAMEWORKS } from './code';
import { nbdistIcon } from '../icon';
import { Commands, labelled } from './commands';
import { frameworkName } from './words';

/** Commands that open the example notebooks and the documents of the installed version. */
export class Help {
  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly trans: TranslationBundle
  ) {}

  addCommands(): void {
    const { trans, app } = this;
    const framework = { type: 'string', enum: ['tensorflow', 'jax'] };
    const folder = { type: 'string', description: 'Folder of the new notebook' };
    const example = labelled(trans.__('Open example notebook'));
    app.commands.addCommand(Commands.openExample, {
      label: args =>
        args['isLauncher'] === true ? trans.__('Distributed training') : example(args),
      caption: trans.__('Open an example notebook for TensorFlow or JAX'),
      icon: nbdistIcon,
      describedBy: { args: { type: 'object', properties: { framework, cwd: folder } } },
      execute: async args => {
        const named = args['framework'] as Framework | undefined;
        const chosen = named ?? (await this.askFramework());
        return chosen === null ? null : this.openExample(chosen, String(args['cwd'] ?? ''));
      }
    });
    app.commands.addCommand(Commands.openDocumentation, {
      label: labelled(trans.__('Open documentation')),
      describedBy: { args: { type: 'object', properties: {} } },
      execute: () => window.open(this.url('documents', 'README.md'), '_blank', 'noopener')
    });
  }

  private url(...parts: string[]): string {
    return URLExt.join(this.app.serviceManager.serverSettings.baseUrl, 'nbdist', ...parts);
  }

  private async askFramework(): Promise<Framework | null> {
    const names = FRAMEWORKS.filter(name => name !== '');
    const { value } = await InputDialog.getItem({
      title: this.trans.__('Distributed training'),
      label: this.trans.__('Framework of the example notebook'),
      items: names.map(frameworkName),
      okLabel: this.trans.__('Open')
    });
    return names.find(name => frameworkName(name) === value) ?? null;
  }

  /** Copy the example to a new file in this folder and open it. */
  private async openExample(framework: Framework, folder: string): Promise<unknown> {
    const { serverSettings, contents, kernelspecs } = this.app.serviceManager;
    const url = this.url('examples', framework);
    const response = await ServerConnection.makeRequest(url, {}, serverSettings);
    if (!response.ok) {
      throw await ServerConnection.ResponseError.create(response);
    }
    const content: unknown = await response.json();
    const file = await contents.newUntitled({ path: folder, type: 'notebook' });
    await contents.save(file.path, { type: 'notebook', format: 'json', content });
    const path = await renamed(contents, file.path, `nbdist ${frameworkName(framework)}.ipynb`);
    const kernel = { name: kernelspecs.specs?.default ?? '' };
    return this.app.commands.execute('docmanager:open', { path, factory: 'Notebook', kernel });
  }
}

/** Rename a file. It keeps its name if the folder contains the new one. */
async function renamed(contents: Contents.IManager, path: string, name: string): Promise<string> {
  try {
    return (await contents.rename(path, PathExt.join(PathExt.dirname(path), name))).path;
  } catch {
    return path;
  }
}
