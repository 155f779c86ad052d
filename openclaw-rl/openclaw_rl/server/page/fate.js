/* What became of a reply: its way from waiting to a version that learned from it, or the reason why not. */

import { h, many } from "./dom.js";
import { STATES, VERSION_STATES, reason, sourceWord, verdictWord } from "./words.js";

const DEAD = ["rejected", "rolled_back", "lost"], LEARNED = ["serving", "retired", "superseded"];

/** Return the steps of an outcome: [text, kind], kind is "done", "now", "good" or "bad"; the last one is where it is. */
export function steps(outcome) {
  const { state, verdict, source } = outcome;
  const found = [];
  const judged = verdict === null ? null : `judged ${verdictWord(verdict)} by ${source === "feedback" && outcome.is_operators ? "the operator" : sourceWord(source)}`;
  if (state === "served") return [[STATES.served, "now"]];
  if (state === "paired") return [["answered", "done"], [STATES.paired, "now"]];
  if (judged) found.push([judged, "done"]);
  if (state === "trained") {
    const isLearned = LEARNED.includes(outcome.version_state);
    found.push([`trained in version ${outcome.trained_in}`, isLearned ? "good" : "done"]);
    if (!isLearned) {
      const kind = DEAD.includes(outcome.version_state) ? "bad" : "now"; // the gate may refuse it yet
      found.push([`version ${outcome.trained_in}: ${VERSION_STATES[outcome.version_state]}`, kind]);
    }
  } else if (state === "dropped") {
    const detail = outcome.detail && outcome.reason === "method" ? ` (${outcome.detail})` : "";
    found.push([`not trained on: ${reason(outcome.reason)}${detail}`, outcome.practised_in === null ? "bad" : "done"]);
  } else {
    found.push([STATES[state], "now"]);
  }
  if (outcome.practised_in !== null) {
    found.push([`practised in version ${outcome.practised_in} (${many(outcome.practised, "reply", "replies")})`, "good"]);
  }
  if (outcome.is_held_back) found.push(["held back: what is learned of the wish is measured on it", "done"]);
  return found;
}

/** True when nothing more will happen to the reply by itself, while the same version serves. */
export function isOver(outcome) {
  const own = outcome.state === "dropped" || (outcome.state === "trained" && LEARNED.includes(outcome.version_state));
  return own && outcome.wish_id === null && (outcome.demonstration === null || isOver(outcome.demonstration));
}

/** The way of a reply as a list that reads from left to right. */
export function way(outcome) {
  const written = outcome.demonstration;
  return [
    h("ol", { class: "way" }, steps(outcome).map(([text, kind]) => h("li", { class: kind }, text)),
      outcome.wish_id !== null && h("li", { class: "link" }, h("a", { href: `#/wishes/${outcome.wish_id}` }, `wish ${outcome.wish_id}`))),
    written && h("ol", { class: "way" }, h("li", { class: "done" }, "your own reply"),
      steps({ ...written, verdict: null }).map(([text, kind]) => h("li", { class: kind }, text))),
  ];
}
