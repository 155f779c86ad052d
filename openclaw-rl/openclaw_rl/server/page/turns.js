/* Turns: every recorded reply, found by words and filters. */

import { asReader, keys, query } from "./api.js";
import { h, put, when } from "./dom.js";
import { longList } from "./list.js";
import { show as showTurn } from "./turn.js";
import { STATES, reason, verdictWord } from "./words.js";

export const title = "Turns";
const PART = 200, ROW = 64, EMPTY_PARTS = 25;
let left = ""; // name of the field that a change was made in: it has the focus again when the list is made anew

const FIELDS = {
  q: ["Words", { type: "search", placeholder: "Search the texts…", id: "search" }],
  state: ["State", [["", "any state"], ...Object.keys(STATES).map((state) => [state, state])]],
  verdict: ["Verdict", [["", "any verdict"], ["1", "good"], ["0", "neutral"], ["-1", "bad"]]],
  source: ["Judged by", [["", "anybody"], ["feedback", "a user"], ["rules", "the rules"], ["llm", "the judge model"]]],
  practice: ["Kind", [["false", "of users"], ["", "all turns"], ["true", "practice"]]],
  weight_version: ["Sampled by", { type: "number", min: 0, placeholder: "version" }],
  trained_in: ["Trained in", { type: "number", min: 0, placeholder: "version" }],
  session_id: ["Session", { type: "text", placeholder: "session id" }],
  user: ["User", { type: "text", placeholder: "name" }],
};

export function show(root, place) {
  if (place.path[0]) return showTurn(root, place);
  const { query: asked, signal, go } = place;
  const wanted = { practice: asked.has("trained_in") ? "" : "false", ...Object.fromEntries(asked) };
  const inputs = Object.entries(FIELDS).filter(([name]) => name !== "user" || keys.get("admin")).map(([name, [label, form]]) => [name, label, field(name, label, form, wanted[name] ?? "")]);
  const below = h("div", { class: "list" });
  const main = inputs.filter(([name]) => name === "q"), more = inputs.filter(([name]) => name !== "q");
  const isNarrowed = more.some(([name]) => asked.has(name));
  const form = h("form", { class: "filters", role: "search", on: { submit: apply, change: apply } },
    main.map(([, , input]) => input),
    h("details", { open: isNarrowed || matchMedia("(min-width: 60rem)").matches }, h("summary", {}, "Filters"),
      h("div", { class: "fields" }, more.map(([, label, input]) => h("label", {}, h("span", { class: "soft" }, label), input)))));
  put(root, h("header", { class: "head" }, h("h1", {}, "Turns")), form, below);

  let isChanged = false;
  signal.addEventListener("abort", () => {
    left = isChanged && form.contains(document.activeElement) ? document.activeElement.name : "";
  });

  function apply(event) {
    event.preventDefault();
    isChanged = event.type === "change";
    const chosen = Object.fromEntries(inputs.map(([name, , input]) => [name, input.value.trim()]));
    if (chosen.practice === "false" && !chosen.trained_in) delete chosen.practice;
    go(`#/turns${query(chosen)}`);
  }

  let next = null, isAsked = false, lookedAt = 0;
  async function part() {
    if (isAsked && next === null) return null;
    // A search may look at a part that holds nothing: it goes on, and asks after a number of parts.
    for (let tries = 0; tries < EMPTY_PARTS; tries += 1) {
      const found = await asReader(`v1/turns${query({ ...wanted, limit: PART, before: next })}`, { signal });
      isAsked = true;
      next = found.next;
      lookedAt += found.looked_at;
      if (found.turns.length || next === null) return found.turns.length ? found.turns : null;
    }
    return [];
  }

  const many = !keys.get("chat") || Boolean(keys.get("admin"));
  put(below, longList({
    label: "Turns", height: ROW, signal, more: part,
    soFar: () => `searched the newest ${lookedAt.toLocaleString()} turns`,
    row: (turn) => row(turn, many),
    open: (turn) => go(`#/turns/${encodeURIComponent(turn.turn_id)}`),
  }));
  const again = left && inputs.find(([name]) => name === left)?.[2];
  left = "";
  if (again) again.focus();
  else if (matchMedia("(pointer: fine)").matches) below.querySelector(".long").focus({ preventScroll: true });
}

function field(name, label, form, value) {
  if (Array.isArray(form)) {
    const select = h("select", { name, "aria-label": label }, form.map(([key, text]) => h("option", { value: key }, text)));
    select.value = value;
    return select;
  }
  return h("input", { name, "aria-label": label, ...form, set: { value } });
}

function row(turn, hasUsers) {
  const value = turn.feedback ?? turn.verdict;
  const what = turn.demonstration_of ? "your reply" : turn.practice ? (turn.practice === "wish" ? `practice of wish ${turn.wish_id}` : "practice") : null;
  return [
    h("span", { class: `mark ${value > 0 ? "good" : value < 0 ? "bad" : "soft"}`, title: value === null ? "no verdict" : verdictWord(value) },
      value > 0 ? "+" : value < 0 ? "−" : value === 0 ? "0" : "·"),
    h("span", { class: "line" }, h("b", {}, turn.asked || "–"), " ", h("span", { class: "soft" }, turn.said ?? "")),
    h("span", { class: "line soft facts" },
      when(turn.finished_at), ` · v${turn.oldest_version}`,
      ` · ${turn.reason ? reason(turn.reason) : turn.state === "trained" ? `trained in v${turn.trained_in}` : STATES[turn.state]}`,
      what && ` · ${what}`,
      hasUsers && ` · ${turn.user}`, turn.session_id && ` · ${turn.session_id}`),
  ];
}
