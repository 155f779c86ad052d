/* Versions: what the gate measured, the batch of each step, and the acts: roll back, pin, pause, train now. */

import { asAdmin, asReader, keys } from "./api.js";
import { busy, button, h, many, nothing, number, put, repeat, when } from "./dom.js";
import { comparison } from "./compare.js";
import { confirm, tell, tellBad } from "./confirm.js";
import { choice, choose, ofChosen, onChoice, ownPolicy, steer } from "./policies.js";
import { VERSION_STATES, verdictWord } from "./words.js";

export const title = "Versions";
const LOOK_MS = 3000, BATCH = 200;
const PASSED = ["serving", "retired", "superseded"];

export function show(root, { path: [wanted], signal, go }) {
  const acts = h("div", {}), body = h("div", {}), compare = h("div", {}), whose = h("div", {});
  put(root, h("header", { class: "head" }, wanted === undefined ? null : h("a", { href: "#/versions", class: "back" }, "‹ Versions"),
    h("h1", {}, wanted === undefined ? "Versions" : `Version ${wanted}`), wanted === undefined && whose), acts, body, compare);
  let shown = "", comparable = "", isOwn = false, isListed = false, looks = 0;

  async function look() {
    const mine = (looks += 1);
    const own = await ownPolicy(signal);
    isOwn = own !== null;
    const [status, history] = own ? [own, own] : await Promise.all([
      asAdmin(`v1/admin/status${ofChosen()}`, { signal }), asAdmin(`v1/admin/history${ofChosen({ verdicts: 1 })}`, { signal })]);
    if (!isListed) { isListed = true; await choice(whose, signal); }
    if (mine !== looks) return; // a newer look is under way: this answer may be from before an act
    const versions = [...history.versions].reverse();
    const now = JSON.stringify([status.serving, status.pinned, status.learning, status.waiting, versions.map((one) => [one.weight_version, one.state, one.metrics, one.batch])]);
    if (now === shown) return;
    shown = now;
    const focus = document.activeElement?.dataset?.act;
    put(acts, controls(status, versions));
    if (wanted === undefined) {
      put(body, table(status, versions));
      const able = versions.filter((one) => PASSED.includes(one.state));
      if (JSON.stringify(able.map((one) => [one.weight_version, one.state])) !== comparable) {
        comparable = JSON.stringify(able.map((one) => [one.weight_version, one.state]));
        if (!isOwn && !compare.contains(document.activeElement)) put(compare, comparison(able, status.serving));
      }
    } else {
      const version = versions.find((one) => String(one.weight_version) === wanted);
      if (!version && !isOwn && await isElsewhere(status)) return;
      put(body, version ? await whole(version, status) : nothing(`There is no version ${wanted} among the newest ${versions.length}.`));
    }
    if (focus) root.querySelector(`[data-act="${focus}"]`)?.focus();
  }

  /** Choose the policy of the wanted version; false: it is of the chosen one, or there is none. */
  async function isElsewhere({ policy }) {
    const found = await asAdmin(`v1/admin/versions/${encodeURIComponent(wanted)}`, { signal }).catch(() => null);
    if (!found || found.policy === policy || found.policy.startsWith("removed:")) return false;
    choose(found.policy === "policy" ? "" : found.policy);
    return true;
  }

  function act(name, label, work, props = {}) {
    const made = button(label, null, { "data-act": name, ...props });
    made.addEventListener("click", busy(made, async () => { await work(); await look(); }, tellBad));
    return made;
  }

  function controls(status, versions) {
    const { serving, pinned, learning, training } = status;
    const isOne = wanted !== undefined, number = Number(wanted);
    const parent = versions.find((one) => one.weight_version === serving)?.parent ?? null;
    const state = [h("b", {}, `version ${serving} serves`), pinned !== null && h("span", { class: "badge" }, "pinned"),
      !training.enabled ? " · learning is off" : learning ? ` · learning, ${many(status.waiting, "sample")} of ${training.batch_size} wait` : h("span", { class: "bad" }, " · learning is paused")];
    const version = versions.find((one) => one.weight_version === number);
    const canServe = version && PASSED.includes(version.state);
    return h("div", { class: "panel" }, h("p", {}, state), h("div", { class: "row" },
      !isOne && act("rollback", "Roll back…", () => rollback(null, parent), { disabled: parent === null, class: "danger" }),
      isOne && canServe && number !== serving && number < serving && act("rollback", `Roll back to version ${number}…`, () => rollback(number, number), { class: "danger" }),
      (isOne ? canServe : true) && (pinned === (isOne ? number : pinned) && pinned !== null
        ? act("pin", "Unpin…", () => pin(null, serving))
        : act("pin", isOne ? `Pin version ${number}…` : `Pin version ${serving}…`, () => pin(isOne ? number : serving, serving))),
      !isOne && training.enabled && act("learning", learning ? "Pause learning…" : "Resume learning…", () => pause(!learning)),
      !isOne && !isOwn && training.enabled && act("train", "Train now…", () => train(status), { disabled: !learning || !status.counts.sampled })));
  }

  async function rollback(to, named) {
    const agreed = await confirm(to === null ? "Roll back?" : `Roll back to version ${to}?`, [
      to === null ? `The newest version before this one that has weights serves (version ${named}, or an older one).` : `Version ${to} serves, with its optimizer state.`,
      "The versions after it are abandoned for good. Running replies finish on theirs.",
      "Turns that only they learned from are left out, unless you let them be trained on again.",
      "Wishes that they practised stop; “Practise again”, in Wishes, takes them up.",
    ], "Roll back", { danger: true, choices: { requeue: "Let the abandoned versions' samples be trained on again" } });
    if (!agreed) return;
    const done = await steer(isOwn, "rollback", { to, requeue: agreed.requeue });
    tell(`Version ${done.serving} serves.`);
    if (wanted !== undefined) go("#/versions");
  }

  async function pin(number, serving) {
    const agreed = number === null
      ? await confirm("Unpin?", ["The newest version that passed the gate serves again, and new ones follow."], "Unpin")
      : await confirm(`Pin version ${number}?`, [
        number === serving ? `Version ${number} keeps serving.` : `Version ${number} serves at once; running replies finish on theirs.`,
        "Training goes on, and no newer version serves until you unpin. Practice waits.",
      ], "Pin");
    if (!agreed) return;
    const done = await steer(isOwn, "pin", { weight_version: number });
    tell(number === null ? "Unpinned." : `Version ${done.serving} is pinned.`);
  }

  async function pause(on) {
    const agreed = on
      ? await confirm("Resume learning?", ["Training steps and practice run again, from the samples that wait."], "Resume")
      : await confirm("Pause learning?", ["Chats go on and are recorded and judged.", "No training step and no practice runs until you resume."], "Pause");
    if (!agreed) return;
    const done = await steer(isOwn, "learning", { on });
    tell(done.learning ? "Learning goes on." : on ? "The operator has paused learning of all." : "Learning is paused.");
  }

  async function train({ counts, training }) {
    const agreed = await confirm("Train now?", [
      `The ${many(counts.sampled, "sample")} that wait make one batch at once, instead of ${training.batch_size}.`,
      "A small batch teaches less, and noisier. The new version serves only if it passes the gate.",
    ], "Train now");
    if (!agreed) return;
    const done = await asAdmin("v1/admin/train", { body: {} });
    tell(`${many(done.waiting, "sample")} go to the trainer.`);
  }

  // -- one version ----------------------------------------------------------------------------------------------------

  async function whole(version, status) {
    if (isOwn && !keys.get("chat")) return nothing("On a server without keys, the turns of a step need the admin key.");
    const found = await asReader(`v1/turns?trained_in=${version.weight_version}&limit=${BATCH}`, { signal });
    const { metrics, batch } = version;
    const gate = ["gate_kl_parent", "gate_kl_base", "gate_canary_drop"].filter((name) => name in metrics);
    return [
      h("dl", { class: "facts" },
        fact("State", [VERSION_STATES[version.state] ?? version.state, status.pinned === version.weight_version && ", pinned", version.reason && `: ${version.reason}`]),
        fact("Made of", version.parent === null ? "the base" : h("a", { href: `#/versions/${version.parent}` }, `version ${version.parent}`)),
        version.committed_at > 0 && fact("Made", when(version.committed_at)),
        batch && fact("Batch", `${many(batch.samples, "sample")}, ${batch.practice} of them practice; ${number(batch.lag)} versions old on average`),
        version.same_weights_as !== null && fact("Weights", `those of version ${version.same_weights_as}`)),
      h("h2", {}, "Gate"),
      gate.length ? h("div", { class: "tiles" }, gate.map((name) => tile(GATE[name], metrics[name]))) : h("p", { class: "soft" }, version.parent === null ? "The base passes no gate." : "The gate has measured nothing."),
      h("h2", {}, "Its batch"),
      found.turns.length ? h("ul", { class: "plain batch" }, found.turns.map(sample)) : h("p", { class: "soft" }, "No turn that is still recorded was trained on in this step."),
      h("h2", {}, "All figures of the step"),
      h("dl", { class: "figures" }, Object.entries(metrics).sort().map(([name, value]) => fact(name, number(value)))),
    ];
  }

  onChoice(() => { shown = ""; look().catch(tellBad); }, signal);
  repeat(look, LOOK_MS, signal, (error) => put(body, nothing(error.message)));
}

const GATE = { gate_kl_parent: "KL to the serving version, nats a token", gate_kl_base: "KL to the base, nats a token", gate_canary_drop: "Canaries lost, nats a token" };
const fact = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
const tile = (name, value) => h("div", { class: "tile" }, h("b", {}, number(value)), h("span", { class: "soft" }, name));

function sample(turn) {
  const value = turn.feedback ?? turn.verdict;
  return h("li", {}, h("a", { href: `#/turns/${encodeURIComponent(turn.turn_id)}` }, turn.asked || turn.turn_id), " ",
    turn.practice ? h("span", { class: "badge" }, turn.practice === "wish" ? `wish ${turn.wish_id}` : "anchor")
      : value !== null && h("span", { class: value > 0 ? "good" : "bad" }, verdictWord(value)),
    h("div", { class: "soft clip" }, turn.said));
}

function table(status, versions) {
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["version", "state", "made"].map((name) => h("th", {}, name)), ["samples", "practice", "reward", "KL parent", "KL base"].map((name) => h("th", { class: "n" }, name)), h("th", {}, "why"))),
    h("tbody", {}, versions.map(({ metrics, batch, ...one }) => h("tr", { class: one.weight_version === status.serving ? "now" : null },
      h("td", {}, h("a", { href: `#/versions/${one.weight_version}` }, `v${one.weight_version}`), one.weight_version === status.pinned && h("span", { class: "badge" }, "pinned")),
      h("td", { class: ["rejected", "rolled_back", "lost"].includes(one.state) ? "bad" : null }, VERSION_STATES[one.state] ?? one.state),
      h("td", {}, when(one.committed_at)),
      [batch?.samples ?? metrics.samples, batch?.practice, metrics.reward_mean, metrics.gate_kl_parent, metrics.gate_kl_base].map((value) => h("td", { class: "n" }, number(value ?? null))),
      h("td", { class: "soft" }, one.reason ?? ""))))));
}
