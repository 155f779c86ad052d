/* The server's pulse: one question every two seconds while the page can be seen, for all views that want to know.
 *
 * With the admin key it is the status with the chosen policy, else `/healthz`. Ends of child processes are remembered as events. */

import { call, keys } from "./api.js";
import { choose, ofChosen, onChoice } from "./policies.js";

const EVERY_MS = 2000, LONGEST_MS = 8000, MOST_EVENTS = 50;
const watchers = new Set();
const events = [];

/** `health`: ok, degraded, starting or away; `status`: the operator's, or null. */
export const pulse = { health: "…", version: null, status: null, at: 0, events };

/** Tell `told` each beat, and the last one at once, until the signal ends. */
export function watch(told, signal) {
  watchers.add(told);
  signal?.addEventListener("abort", () => watchers.delete(told), { once: true });
  if (pulse.at) told(pulse);
}

let timer = 0, newest = 0;

/** Ask now, and then again and again; an earlier question that still runs goes on to nothing. */
export async function beat() {
  clearTimeout(timer);
  newest += 1;
  const own = newest;
  if (!document.hidden) {
    await ask();
    if (own !== newest) return;
    for (const told of watchers) told(pulse);
  }
  timer = setTimeout(beat, EVERY_MS);
}

async function ask() {
  const key = keys.get("admin"), signal = AbortSignal.timeout(LONGEST_MS); // a server that hangs is away
  pulse.at = Date.now() / 1000;
  try {
    if (key) {
      const status = await (await call(`v1/admin/status${ofChosen()}`, { key, signal })).json();
      note(pulse.status, status);
      Object.assign(pulse, { status, version: status.serving, health: status.problems.length ? "degraded" : "ok" });
    } else {
      const told = await (await call("healthz", { signal })).json();
      Object.assign(pulse, { status: null, version: told.weight_version, health: told.status });
    }
  } catch (error) {
    if (error.status === 401) keys.refuse("admin", key);
    if (error.code === "policy_not_found") choose(""); // its user was forgotten
    Object.assign(pulse, { health: error.status === 503 ? "starting" : error.status ? "…" : "away", ...(error.status ? { status: null } : {}) });
  }
}

function note(before, now) {
  if (!before || before.started_at !== now.started_at) return;
  const at = pulse.at, add = (text) => {
    events.unshift({ at, text });
    events.length = Math.min(events.length, MOST_EVENTS);
  };
  for (const child of now.children) {
    const old = before.children.find((one) => one.name === child.name);
    const ended = old && (child.restarts > old.restarts || (old.pid !== null && child.pid === null));
    if (ended && !(old.pid === null && child.restarts > old.restarts && child.last_exit === old.last_exit)) {
      add(`${child.name} ended (exit ${child.last_exit}); the server starts it again`);
    } else if (old && old.pid === null && child.pid !== null) {
      add(`${child.name} runs again`);
    }
  }
  if (now.policy === before.policy && now.serving !== before.serving) add(`version ${now.serving} serves`);
  for (const problem of now.problems) if (!before.problems.includes(problem)) add(problem);
}

onChoice(beat);
document.addEventListener("visibilitychange", () => { if (!document.hidden) beat(); });
