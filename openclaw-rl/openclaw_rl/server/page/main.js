/* The page: which view is shown, the line at the top, and the keys that hold everywhere.
 *
 * The address names the view: `#/turns?verdict=-1`. A `#` with anything but a path behind it is the admin key, as
 * `openclaw-rl page` passes it; it moves to the tab's own storage at once. */

import { keys } from "./api.js";
import { button, h, put, redraw } from "./dom.js";
import { tell } from "./confirm.js";
import { help } from "./help.js";
import { beat, watch } from "./pulse.js";
import * as chat from "./chat.js";
import * as curves from "./curves.js";
import * as state from "./state.js";
import * as turns from "./turns.js";
import * as versions from "./versions.js";
import * as wishes from "./wishes.js";

const VIEWS = { chat, wishes, turns, versions, curves, state };
const main = document.getElementById("view"), nav = document.getElementById("views"), line = document.getElementById("line");
let leave = new AbortController();

function takeKey() {
  if (location.hash.length < 2 || location.hash.startsWith("#/")) return;
  keys.put("admin", decoded(location.hash.slice(1)));
  history.replaceState(null, "", `${location.pathname}#/chat`); // the key does not stay in the address
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a lone % is no escape
  }
}

function route() {
  takeKey();
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map(decoded);
  const view = VIEWS[name] ?? chat;
  leave.abort();
  leave = new AbortController();
  const shown = VIEWS[name] ? name : "chat";
  document.title = `${view.title} · OpenClaw-RL`;
  document.body.dataset.view = shown;
  for (const link of nav.children) {
    if (link.dataset.view === shown) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" }); // on a small phone the names take more than its width
    } else link.removeAttribute("aria-current");
  }
  put(main);
  main.scrollTop = 0;
  view.show(main, { path: rest, query: new URLSearchParams(search ?? ""), signal: leave.signal, go });
}

function go(hash) {
  if (location.hash === hash) route();
  else location.hash = hash;
}

function showLine({ health, version, status }) {
  const words = { ok: "all is well", degraded: "degraded", starting: "starting…", away: "the server does not answer" };
  const isBad = health === "degraded" || health === "away";
  document.getElementById("model").textContent = status ? `${status.model} · ${status.method}` : "";
  redraw(line, [health, version, status?.pinned, status?.practice?.line, status?.problems], () => [
    version !== null && h("a", { href: `#/versions/${version}`, class: "badge", title: "The version that serves" }, `v${version}`),
    status?.pinned !== null && status && h("span", { class: "badge" }, "pinned"),
    status?.practice && h("span", { class: "soft practice", title: status.practice.line }, status.practice.line),
    h("a", { href: "#/state", class: `dot ${isBad ? "bad" : health === "ok" ? "good" : ""}`, title: status?.problems.join("\n") || words[health] }, words[health] ?? "…"),
  ]);
}

function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, dialog")) return;
  const views = Object.keys(VIEWS), at = Number(event.key);
  if (at >= 1 && at <= views.length) go(`#/${views[at - 1]}`);
  else if (event.key === "n") go("#/chat/new");
  else if (event.key === "?") help();
  else if (event.key === "/") {
    const place = document.getElementById("search") ?? document.getElementById("say");
    if (!place) return;
    place.focus();
  } else return;
  event.preventDefault();
}

put(nav, Object.entries(VIEWS).map(([name, view]) => h("a", { href: `#/${name}`, "data-view": name }, view.title)));
document.getElementById("skip").addEventListener("click", () => main.focus());
document.getElementById("help").replaceWith(button("?", help, { title: "Keys (?)", class: "quiet", id: "help" }));
addEventListener("hashchange", route);
addEventListener("keydown", onKey);
addEventListener("unhandledrejection", (event) => {
  if (event.reason?.name === "AbortError") event.preventDefault();
  else if (event.reason?.status !== undefined) { event.preventDefault(); tell(event.reason.message, true); }
});
watch(showLine);
keys.onChange(() => beat());
route();
beat();
