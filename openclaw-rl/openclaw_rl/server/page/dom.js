/* Elements, numbers and times. Text reaches the document as text nodes alone: no view can write HTML. */

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. `props`: `class`, `on` (event → function), `set` (properties), `css` (custom properties), the rest
 *  are attributes; false and null leave an attribute out. Children: nodes, texts, lists of them; null and false: none. */
export function h(tag, props = {}, ...children) {
  const svg = tag.startsWith("svg:");
  const element = svg ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "set") Object.assign(element, value);
    else if (name === "css") for (const [key, css] of Object.entries(value)) element.style.setProperty(key, css);
    else if (name.startsWith("on")) throw new Error(`${name}: handlers are functions, under \`on\``);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

function add(parent, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) add(parent, child);
    else parent.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replace what is inside an element. */
export function put(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

const drawn = new WeakMap(); // element → the data that it shows

/** Replace what is inside an element when its data changed; a link there keeps the focus. A view that is looked at
 *  every few seconds would else lose the focus, and be read aloud again. */
export function redraw(element, data, make) {
  const now = JSON.stringify(data);
  if (drawn.get(element) === now) return;
  drawn.set(element, now);
  const focused = element.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  put(element, make());
  if (focused !== null) element.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
}

/** A button that acts. Where the label is a sign, the title is its name for screen readers. */
export function button(label, act, props = {}) {
  const name = /[a-z]{2}/i.test(label) ? null : props.title;
  return h("button", { type: "button", "aria-label": name, ...props, on: act ? { click: act } : {} }, label);
}

/** Run an async act from a button: the button waits, and a failure is told at its place. */
export function busy(element, work, tell) {
  return async () => {
    if (element.ariaDisabled === "true") return;
    element.ariaDisabled = "true"; // not `disabled`: that would take the focus away from the keyboard
    try {
      await work();
    } catch (error) {
      if (error.name !== "AbortError") tell(error.message);
    } finally {
      element.ariaDisabled = null;
    }
  };
}

export function when(seconds) {
  if (!seconds) return "";
  const at = new Date(1000 * seconds), today = new Date().toDateString() === at.toDateString();
  return at.toLocaleString([], today ? { timeStyle: "medium" } : { dateStyle: "short", timeStyle: "short" });
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString();
  const size = Math.abs(value);
  return size >= 1e5 || (size < 1e-4 && size > 0) ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}

export function percent(part) {
  return part === null || part === undefined ? "–" : `${Math.round(100 * part)} %`;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; count >= 1000 && at < units.length - 1; at += 1) count /= 1000;
  return `${count < 10 && at ? count.toFixed(1) : Math.round(count)} ${units[at]}`;
}

export function signed(value) {
  return value > 0 ? `+${number(value)}` : value < 0 ? `−${number(-value)}` : "0";
}

/** A message in the place of a view that has nothing to show. */
export const nothing = (text) => h("p", { class: "empty soft" }, text);

/** The count and its noun. */
export function many(count, one, more = `${one}s`) {
  return `${count.toLocaleString()} ${count === 1 ? one : more}`;
}

/** Wait, unless the signal ends first. */
export function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("left", "AbortError"));
    }, { once: true });
  });
}

/** Call `look` now and every `ms` while the page can be seen, until the signal ends. A failure does not end it, but a
 *  final one: a key that was not given, a thing that is gone. That one goes to `ended`. */
export async function repeat(look, ms, signal, ended = () => undefined) {
  while (!signal.aborted) {
    try {
      if (!document.hidden) await look();
      await pause(ms, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error.isFinal) return ended(error);
      await pause(ms, signal).catch(() => undefined);
    }
  }
}
