/** Object that releases its resources. */
export interface IDisposable {
  dispose(): void;
}

/** Collection of cleanup functions, called in reverse order. */
export class Disposables implements IDisposable {
  private readonly ends: (() => void)[] = [];

  add(end: () => void): void {
    this.ends.push(end);
  }

  /** Listen to an event until disposal. */
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

/** Attributes by name. Undefined values are omitted. */
export type Attributes = Readonly<Record<string, string | number | undefined>>;

/** Create an element of class `nbdist-{name}`. */
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

/** Set a text if it differs, to avoid a needless layout. */
export function setText(node: Node, text: string): void {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}

/** Set an attribute if it differs. */
export function setAttribute(element: Element, name: string, value: string): void {
  if (element.getAttribute(name) !== value) {
    element.setAttribute(name, value);
  }
}

/** Suffix for ids: a page may contain this script twice, from JupyterLab and from a widget. */
const SCRIPT = Math.random().toString(36).slice(2, 8);
let named = 0;

/** Return an id that is unique in the page. */
export function newId(what: string): string {
  return `nbdist-${what}-${SCRIPT}-${++named}`;
}
