/* State: the parts of the server, what waits where, what is out of order, and what happened while one looked. */

import { asAdmin } from "./api.js";
import { bytes, h, many, nothing, number, percent, put, redraw, repeat, when } from "./dom.js";
import { choice, nameOf, ownPolicy } from "./policies.js";
import { beat, watch } from "./pulse.js";
import { STATES, reason } from "./words.js";

export const title = "State";
const SHOWN = 10; // events
const LOOK_MS = 3000;
const WAITS = ["served", "paired", "judged", "sampled", "leased", "trained"];

export function show(root, { signal }) {
  const alarms = h("section", { "aria-live": "polite" }), parts = h("section", {}), rest = h("section", {}), past = h("section", {});
  const whose = h("div", {});
  put(root, h("header", { class: "head" }, h("h1", {}, "State"), whose), alarms, past, parts, rest);

  // The pulse brings the status; this question only asks for the key where there is none.
  repeat(async () => {
    const own = await ownPolicy(signal);
    if (own) {
      redraw(parts, own, () => [h("h2", {}, "Your policy"), h("div", { class: "tiles" }, ownTiles(own))]);
      return;
    }
    await asAdmin("v1/admin/status", { signal });
    beat();
    await choice(whose, signal);
    throw Object.assign(new Error(""), { isFinal: true });
  }, LOOK_MS, signal, (error) => error.message && put(alarms, nothing(error.message)));

  watch(({ status, health, events }) => {
    if (health === "away") {
      redraw(alarms, "away", () => alarm("The server does not answer."));
      return;
    }
    if (!status) return;
    redraw(alarms, status.problems, () => (status.problems.length ? status.problems.map(alarm) : h("p", { class: "panel good" }, "All is well.")));
    put(parts, h("h2", {}, "Parts"), h("div", { class: "tiles" }, tiles(status)));
    redraw(rest, [status.counts, status.training.batch_size], () => [queues(status), left(status)]);
    redraw(past, events, () => events.length > 0 && [h("h2", {}, "Since you look"),
      h("ol", { class: "events" }, events.slice(0, SHOWN).map((event) => h("li", {}, h("span", { class: "soft" }, when(event.at)), ` ${event.text}`)))]);
  }, signal);
}

const alarm = (text) => h("p", { class: "panel bad", role: "alert" }, text);

function tile(name, value, more, isBad = false) {
  return h("div", { class: `tile ${isBad ? "bad" : ""}` }, h("span", { class: "soft" }, name), h("b", {}, value), h("span", { class: "soft" }, more));
}

function child(status, name) {
  const found = status.children.find((one) => one.name === name);
  if (!found) return null;
  const ends = found.restarts ? `ended ${many(found.restarts, "time")}, last exit ${found.last_exit}` : `process ${found.pid}`;
  return { isDown: found.pid === null, ends: found.pid === null ? `not running, last exit ${found.last_exit}` : ends };
}

function tiles(status) {
  const engine = child(status, "engine"), trainer = child(status, "trainer"), { disk, practice, training } = status;
  const said = status.trainer.last_call_s;
  const heard = said === null ? "was never heard" : `last heard ${said < 90 ? `${Math.round(said)} s` : `${Math.round(said / 60)} min`} ago`;
  const judge = status.scoring.counts;
  const failed = Object.entries(judge).filter(([name]) => name.includes("failed")).reduce((sum, [, n]) => sum + n, 0);
  return [
    tile("Engine", status.engine.is_open ? "answers" : "not ready", [status.engine.kind, engine && ` · ${engine.ends}`], !status.engine.is_open),
    ...engineTiles(status),
    tile("Judge", status.judge.kind === "llm" ? "a model" : status.judge.kind, failed ? many(failed, "failed call") : "no failed call"),
    tile("Trainer", !training.enabled ? "off" : trainer?.isDown ? "not running" : status.learning ? "learns" : "paused",
      training.enabled ? [trainer ? trainer.ends : status.trainer.kind, ` · ${heard}`] : "training.enabled is off", training.enabled && trainer?.isDown),
    tile("Practice", practice === null ? "off" : practice.waits === null ? "practises" : "waits", practice === null ? `method ${status.method}, or practice.enabled is off` : practice.line),
    disk && tile("Disk", `${bytes(disk.free)} free`, `ledger ${bytes(disk.ledger)} · ${percent(1 - disk.free / disk.total)} in use`, disk.free < 1e9),
    tile("Version", `v${status.serving}`, [status.pinned === null ? "" : "pinned · ", `tip v${status.tip}${status.policies > 1 ? ` · ${nameOf(status.policy)}` : ""} · since ${when(status.started_at)}`]),
  ];
}

/** A tile for each engine of a pool; none for one engine alone. */
function engineTiles(status) {
  return status.engines.map((engine, place) => {
    const own = child(status, engine.name), isOut = !engine.is_in && !engine.is_drained;
    const load = `${engine.running} running · ${many(engine.sessions, "session")}`;
    return tile(`Engine ${place + 1}`, engine.is_drained ? "drained" : engine.is_in ? "serves" : "out of the pool", [own ? own.ends : engine.engine, ` · ${load}`], isOut);
  });
}

function ownTiles({ policy, serving, pinned, tip, learning, waiting, practice_waiting: practice, training }) {
  return [
    tile("Version", `v${serving}`, [pinned === null ? "" : "pinned · ", `newest v${tip} · it learns from ${nameOf(policy)} alone`]),
    tile("Learning", !training.enabled ? "off" : learning ? "on" : "paused", `${waiting} of the ${training.batch_size} samples of the next step are there`),
    tile("Practice", practice ? many(practice, "sample") : "none", "waits for a step"),
  ];
}

function queues({ counts, training }) {
  return [h("h2", {}, "Queues"), h("ol", { class: "queue" }, WAITS.map((state) =>
    h("li", {}, h("a", { href: `#/turns?state=${state}`, title: STATES[state] }, h("b", {}, number(counts[state] ?? 0)), h("span", { class: "soft" }, state)))),
  h("li", {}, h("span", {}, h("b", {}, number(counts["practice.sampled"] ?? 0)), h("span", { class: "soft" }, "practice waits")))),
  h("p", { class: "soft" }, `${many(counts.running, "chat")} running · ${many(counts.requests, "request")} in all · a batch is ${many(training.batch_size, "sample")}`)];
}

function left({ counts }) {
  const found = Object.entries(counts).filter(([name, n]) => name.startsWith("dropped.") && n).sort((a, b) => b[1] - a[1]);
  return [h("h2", {}, "Left out of training"), found.length
    ? h("ul", { class: "plain" }, found.map(([name, n]) => h("li", {}, h("b", {}, number(n)), ` ${reason(name.slice(8))}`)))
    : h("p", { class: "soft" }, "None.")];
}
