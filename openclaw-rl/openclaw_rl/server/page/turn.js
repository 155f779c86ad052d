/* One turn in full: prompt, reply, next state, votes, hint, credit of each token, its way; and how to correct it. */

import { asAdmin, asReader, keys } from "./api.js";
import { busy, button, h, many, nothing, number, put, repeat, signed, when } from "./dom.js";
import { confirm, tell, tellBad } from "./confirm.js";
import { heat } from "./heat.js";
import { render } from "./text.js";
import { STATES, reason, sourceWord, verdictWord } from "./words.js";

const LOOK_MS = 4000;
const EFFECTS = {
  judged: "The verdict is replaced.",
  rescored: "The verdict is replaced: the turn is scored again.",
  late: "Recorded: a trainer has the turn already.",
  recorded: "Recorded. It changes nothing for this turn.",
};
const WAITS = ["served", "paired", "judged", "sampled"];

export function show(root, { path: [id], signal, go }) {
  const facts = h("div", {}), content = h("div", {}), tokens = h("section", {});
  put(root, h("header", { class: "head" }, h("a", { href: "#/turns", class: "back" }, "‹ Turns"), h("h1", {}, "One turn")), facts, content, tokens);
  let shown = "", looks = 0;
  const path = `v1/turns/${encodeURIComponent(id)}`;

  async function look() {
    const mine = (looks += 1);
    let mark, record;
    try {
      mark = await asReader(`${path}/state`, { signal });
      if (JSON.stringify(mark) === shown) return;
      record = await asReader(`${path}?tokens=false`, { signal });
    } catch (error) {
      if (error.status !== 404) throw error;
      throw Object.assign(new Error("There is no such turn: it was forgotten, or it is another user's."), { isFinal: true });
    }
    if (mine !== looks) return; // a newer look is under way: this answer may be from before an act
    shown = JSON.stringify(mark);
    put(facts, told(record, mark), acts(record, mark));
    put(content, record.request.messages.length > 1 && earlier(record.request.messages.slice(0, -1)),
      h("h2", {}, "Prompt"), message(record.request.messages.at(-1)),
      h("h2", {}, "Reply"), reply(record),
      h("h2", {}, "Next state"), following(record),
      h("h2", {}, "Verdict"), verdict(record),
      hint(record), way(record));
    const found = await asReader(`${path}/tokens`, { signal });
    put(tokens, found.tokens.length ? [h("h2", {}, "Credit per token"), heat(found)] : null);
  }

  function told({ request, turn, state, reason: why, trained_in: trained, practice, practice_of: of, wish_id: wish }, mark) {
    const { scope } = request;
    const versions = turn.versions.map((run) => [h("a", { class: "badge", href: `#/versions/${run.weight_version}` }, `v${run.weight_version}`),
      turn.versions.length > 1 ? ` ${many(run.length, "token")} ` : " "]);
    const rows = [
      ["State", [state, why && `: ${reason(why)}`, !why && state !== "trained" && `: ${STATES[state]}`, trained !== null && ["in ", h("a", { href: `#/versions/${trained}` }, `version ${trained}`)]]],
      mark.demonstration_of === null ? ["Sampled by", versions]
        : ["Written by", ["its user, in place of ", h("a", { href: `#/turns/${encodeURIComponent(mark.demonstration_of)}` }, "this reply")]],
      ["Tokens", `${number(request.prompt_tokens)} of the prompt, ${number(turn.response_tokens)} of the reply, ended by ${turn.finish_reason}`],
      ["When", when(turn.finished_at)],
      ["User", scope.user],
      scope.session_id && ["Session", h("a", { href: `#/turns?session_id=${encodeURIComponent(scope.session_id)}` }, scope.session_id)],
      practice && ["Practice", [practice === "wish" ? h("a", { href: `#/wishes/${wish}` }, `of wish ${wish}`) : "an anchor", of && [", on ", h("a", { href: `#/turns/${encodeURIComponent(of)}` }, "this turn")]]],
      ["Id", h("code", {}, turn.turn_id)],
    ];
    return h("dl", { class: "facts" }, rows.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  }

  function acts(record, mark) {
    const own = !record.practice, isJudged = own && mark.demonstration_of === null, isWaiting = WAITS.includes(record.state);
    const make = (label, work, props = {}) => {
      const made = button(label, null, props);
      made.addEventListener("click", busy(made, work, tellBad));
      return made;
    };
    const overrides = [[1, "Good"], [0, "Neutral"], [-1, "Bad"]].map(([value, label]) => make(label, () => override(value), {
      "aria-pressed": String(record.verdict?.value === value), class: value > 0 ? "good" : value < 0 ? "bad" : "",
    }));
    return h("div", { class: "row acts" },
      isJudged && h("span", { class: "group", role: "group", "aria-label": "Override the verdict" }, h("span", { class: "soft" }, "Verdict "), overrides),
      isWaiting && make("Leave out", leaveOut),
      own && make("Forget this session…", () => forget(record), { class: "danger" }));
  }

  async function override(value) {
    const agreed = await confirm(`Make the verdict ${verdictWord(value)}?`, [
      "It replaces the judge's verdict, as feedback of the turn's user.",
      "A turn that was trained on keeps its effect; the new verdict counts if that version is taken back.",
    ], "Override");
    if (!agreed) return;
    const { effect } = await asReader(path, { body: { verdict: value } });
    tell(EFFECTS[effect]);
    shown = "";
    await look();
  }

  async function leaveOut() {
    const agreed = await confirm("Leave this turn out of training?", [
      "No trainer gets it, for good, nor the reply that was written in its place. It stays in the list.",
      "A wish that was asked here stays: remove it in Wishes.",
    ], "Leave it out");
    if (!agreed) return;
    await asReader(path, { body: { train: false } });
    tell("The turn is left out.");
    await look();
  }

  async function forget({ request: { scope } }) {
    const what = scope.session_id === null ? "the conversation of this turn" : `the session ${scope.session_id}`;
    const agreed = await confirm("Forget this session?", [
      `Every turn of ${what} is deleted: texts, tokens, verdicts, and the wishes that were asked only there.`,
      "Versions that trained on them keep what they learned, unless you roll back with it.",
      "It cannot be undone.",
    ], "Forget it", { danger: true, choices: { rebuild: "Also roll back to before these turns were learned from, and train again on the rest" } });
    if (!agreed) return;
    const body = scope.session_id === null ? { turn_id: id } : { session_id: scope.session_id, user: scope.user };
    const done = await asAdmin("v1/admin/forget", { body: { ...body, rebuild: agreed.rebuild } });
    tell(`${many(done.turns, "turn")} forgotten.${done.rebuilt ? ` Serving now: ${Object.values(done.rebuilt.serving).join(", ")}.` : ""}${done.not_rebuilt ? ` Not rolled back: ${done.not_rebuilt}` : ""}`);
    go("#/turns");
  }

  repeat(look, LOOK_MS, signal, (error) => put(facts, nothing(error.message)));
}

const textOf = ({ content }) =>
  typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? `[${part.type}]`).join("\n");

function message(one) {
  if (!one) return h("p", { class: "soft" }, "The prompt is not kept.");
  return h("article", { class: `told ${one.role}` }, h("b", { class: "soft" }, one.role), h("div", { class: "text" }, render(textOf(one))),
    (one.tool_calls ?? []).map((call) => h("pre", { tabindex: 0 }, `${call.function.name}(${typeof call.function.arguments === "string" ? call.function.arguments : JSON.stringify(call.function.arguments)})`)));
}

const earlier = (messages) => h("details", {}, h("summary", {}, `${many(messages.length, "earlier message")}`), messages.map(message));

function reply({ turn }) {
  return [turn.reply.reasoning_content && h("details", { class: "thought" }, h("summary", {}, "Thoughts"), h("div", { class: "soft pre" }, turn.reply.reasoning_content)), message(turn.reply)];
}

function following({ next_state: next }) {
  if (!next) return h("p", { class: "soft" }, "Nobody has answered it.");
  return [next.messages.map(message), next.reactions.length > 0 && h("p", {}, `Reactions: ${next.reactions.join(" ")}`)];
}

function verdict({ verdict: given, feedback }) {
  const isOperator = Boolean(keys.get("admin"));
  return [
    given ? h("p", {}, h("b", { class: given.value > 0 ? "good" : given.value < 0 ? "bad" : "" }, verdictWord(given.value)),
      ` by ${sourceWord(given.source, isOperator)}`, given.votes.length > 0 && `, votes ${given.votes.map((vote) => (vote === null ? "none" : signed(vote))).join(", ")}`,
      given.rationale && h("span", { class: "soft pre" }, ` ${given.rationale}`)) : h("p", { class: "soft" }, "None."),
    feedback.map((said) => h("article", { class: "told" }, h("b", { class: "soft" }, `feedback, ${when(said.at)}`), " ",
      said.value !== null && h("span", {}, `${verdictWord(said.value)} `),
      said.comment && h("p", {}, `“${said.comment}”`),
      said.demonstration && h("details", {}, h("summary", {}, "It should have said"), h("div", { class: "text" }, render(said.demonstration))))),
  ];
}

function hint({ sample }) {
  const found = sample?.extra_json ? JSON.parse(sample.extra_json).hint : null;
  if (!found) return null;
  return [h("h2", {}, "Hint"), h("p", {}, found.text ? `“${found.text}”` : "–", h("span", { class: "soft" },
    ` from ${found.source ?? "–"}`, found.absent && `; no distillation: ${found.absent} ${found.detail ?? ""}`))];
}

function way({ events }) {
  return [h("h2", {}, "Its way"), h("ol", { class: "events" }, events.map((event) =>
    h("li", {}, h("span", { class: "soft" }, when(event.at)), " ", h("b", {}, event.state), event.detail && ` ${event.detail}`)))];
}
