/** What can be ended, and gives back what it holds. */
export interface IDisposable {
  dispose(): void;
}

/** Ends all that was added to it, the latest first. */
export class Disposables implements IDisposable {
  private readonly ends: (() => void)[] = [];

  add(end: () => void): void {
    this.ends.push(end);
  }

  /** Hear an event until the end. */
  listen<E extends Event>(
    target: EventTarget,
    name: string,
    heard: (event: E) => void,
    options?: AddEventListenerOptions
  ): void {
    const listener = (event: Event): void => heard(event as E);
    target.addEventListener(name, listener, options);
    this.add(() => target.removeEventListener(name, listener, options));
  }

  dispose(): void {
    for (const end of this.ends.splice(0).reverse()) {
      end();
    }
  }
}

/** Attributes by name; those that are undefined are left out. */
export type Attributes = Readonly<Record<string, string | number | undefined>>;

/** A new element of class `nbdist-{name}`. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  name: string,
  attributes: Attributes = {},
  ...children: readonly (Node | string)[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  if (name !== '') {
    element.className = `nbdist-${name}`;
  }
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined) {
      element.setAttribute(key, String(value));
    }
  }
  element.append(...children);
  return element;
}

/** Set a text, only if it is another: layout is not asked for in vain. */
export function setText(node: Node, text: string): void {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}

/** Set an attribute, only if it is another. */
export function setAttribute(element: Element, name: string, value: string): void {
  if (element.getAttribute(name) !== value) {
    element.setAttribute(name, value);
  }
}

/** A page may have the view twice: JupyterLab's and, with scripts of its own, a widget's. */
const SCRIPT = Math.random().toString(36).slice(2, 8);
let named = 0;

/** An id that no other element has. */
export function newId(what: string): string {
  return `nbdist-${what}-${SCRIPT}-${++named}`;
}
