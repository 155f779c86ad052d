/* A list of any length: only the rows that can be seen are in the document, and more are fetched as one scrolls.
 *
 * Rows have one height. j and k, the arrows, Home and End move the selection; Enter opens it. */

import { button, h, put } from "./dom.js";

const SPARE = 6; // rows beyond the edges

/** `row(item)` makes the content of a row, `open(item)` opens one. `more()` returns further items, null at the end, or
 *  none when it searched for long: a button then goes on, and `soFar()` tells how far it came. */
export function longList({ label, height, row, more, open, signal, soFar }) {
  const items = [];
  let isOver = false, isLoading = false, isStopped = false, chosen = 0, from = -1, to = -1;
  const space = h("div", { class: "space", role: "presentation" });
  const foot = h("p", { class: "soft foot", role: "status" });
  const place = h("div", { class: "long", tabindex: 0, role: "listbox", "aria-label": label, css: { "--row": `${height}px` } }, space);
  const rows = new Map(); // index → element
  const stats = { script: 0, longest: 0, draws: 0 }; // milliseconds of drawing, for the tests

  function draw() {
    const start = performance.now();
    const first = Math.max(0, Math.floor(place.scrollTop / height) - SPARE);
    const last = Math.min(items.length, Math.ceil((place.scrollTop + place.clientHeight) / height) + SPARE);
    if (first !== from || last !== to) {
      for (const [at, element] of rows) {
        if (at < first || at >= last) {
          element.remove();
          rows.delete(at);
        }
      }
      for (let at = first; at < last; at += 1) {
        if (!rows.has(at)) rows.set(at, space.appendChild(make(at)));
      }
      [from, to] = [first, last];
    }
    if (last > items.length - 40) load();
    const took = performance.now() - start;
    stats.script += took;
    stats.longest = Math.max(stats.longest, took);
    stats.draws += 1;
  }

  function make(at) {
    const element = h("div", {
      class: "item", role: "option", id: `row-${at}`, "aria-selected": String(at === chosen), "aria-posinset": at + 1,
      css: { "--at": String(at) },
      on: { click: () => { choose(at); open(items[at]); } },
    }, row(items[at]));
    return element;
  }

  async function load() {
    if (isLoading || isOver || isStopped || signal.aborted) return;
    isLoading = true;
    try {
      const found = await more();
      if (found === null) isOver = true;
      else items.push(...found);
      isStopped = found?.length === 0;
    } catch (error) {
      isStopped = true;
      if (error.name !== "AbortError") put(foot, error.message, " ", onward("Try again"));
      return;
    } finally {
      isLoading = false;
    }
    space.style.setProperty("height", `${items.length * height}px`);
    const count = items.length.toLocaleString();
    put(foot, isOver ? (items.length ? `${count} in all` : "Nothing was found.") : `${count} so far`,
      isStopped && [`, ${soFar()} `, onward("Search on")]);
    to = -1;
    draw();
  }

  function onward(label) {
    return button(label, () => { isStopped = false; put(foot, "…"); place.focus({ preventScroll: true }); load(); }, { class: "quiet" });
  }

  function choose(at) {
    rows.get(chosen)?.setAttribute("aria-selected", "false");
    chosen = Math.min(Math.max(at, 0), items.length - 1);
    rows.get(chosen)?.setAttribute("aria-selected", "true");
    place.setAttribute("aria-activedescendant", `row-${chosen}`);
    const top = chosen * height;
    if (top < place.scrollTop) place.scrollTop = top;
    else if (top + height > place.scrollTop + place.clientHeight) place.scrollTop = top + height - place.clientHeight;
  }

  let isDue = false;
  place.addEventListener("scroll", () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; draw(); });
  }, { passive: true });
  place.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(place.clientHeight / height) - 1);
    const to = { j: chosen + 1, ArrowDown: chosen + 1, k: chosen - 1, ArrowUp: chosen - 1, Home: 0, End: items.length - 1,
      PageDown: chosen + page, PageUp: chosen - page }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      choose(to);
      draw();
    } else if (event.key === "Enter" && items[chosen]) {
      open(items[chosen]);
    }
  });
  new ResizeObserver(() => { from = -1; draw(); }).observe(place);
  place.longList = stats;
  load();
  return [place, foot];
}
