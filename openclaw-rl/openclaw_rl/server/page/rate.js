/* Feedback on one reply: 👍 or 👎 with reasons and words, and the reply that it should have been.
 *
 * A value is sent at once. The reasons are whole sentences, because the methods that learn from words read them as a
 * wish. The same button again makes the verdict neutral (0). */

import { asUser } from "./api.js";
import { button, busy, h, put } from "./dom.js";
import { tell, tellBad } from "./confirm.js";

const REASONS = {
  good: ["Just right in length.", "Correct.", "I like the tone.", "Well laid out."],
  bad: [
    "That is too long. Please answer more briefly.",
    "That is too short. Please tell more.",
    "That is wrong.",
    "You did not do what I asked.",
    "Please write in a plainer tone.",
    "Please answer in plain sentences, without a list.",
  ],
};

const EFFECTS = {
  judged: "It is the verdict on this reply now.",
  rescored: "The reply is scored again with it.",
  late: "The reply was trained on already: it counts if that version is taken back.",
  recorded: "It is kept.",
};

const send = (node, said) =>
  asUser("v1/feedback", { body: { turn_id: node.turn, feedback_id: `page-${crypto.randomUUID?.() ?? Date.now()}`, ...said } });

/** The buttons of one reply, and a place for the form below them. `changed`: the chat is to be saved and looked at. */
export function rating(node, changed) {
  const place = h("div", { class: "rate-form" });
  const state = { up: null, down: null };

  async function value(sign) {
    const next = node.rated === sign ? 0 : sign;
    const answer = await send(node, { value: next });
    node.rated = next || null;
    show();
    tell(next || answer.effect === "late" ? EFFECTS[answer.effect] : "The verdict is neutral: nothing is learned from this reply.");
    changed();
    if (next) form(next > 0 ? "good" : "bad");
    else put(place);
  }

  function show() {
    state.up.setAttribute("aria-pressed", String(node.rated === 1));
    state.down.setAttribute("aria-pressed", String(node.rated === -1));
  }

  function form(kind) {
    const words = h("textarea", { rows: 2, maxlength: 8000, "aria-label": "Comment", placeholder: "In your own words. Whole sentences teach best." });
    const chips = REASONS[kind].map((text) => button(text, () => {
      words.value = words.value.includes(text) ? words.value : `${words.value} ${text}`.trim();
      words.focus();
    }, { class: "chip" }));
    const done = button("Send the comment", null, { class: "primary" });
    done.addEventListener("click", busy(done, async () => {
      if (!words.value.trim()) return words.focus();
      const answer = await send(node, { comment: words.value.trim() });
      node.comment = words.value.trim();
      put(place);
      tell(EFFECTS[answer.effect]);
      changed();
    }, tellBad));
    put(place, h("div", { class: "chips" }, chips), words,
      h("div", { class: "row" }, done, button("Close", () => put(place))));
    keysOf(place, done, () => put(place));
  }

  function rewrite() {
    const words = h("textarea", { rows: 6, "aria-label": "The reply that it should have been" });
    words.value = node.demonstration ?? node.text;
    const done = button("Teach this reply", null, { class: "primary" });
    done.addEventListener("click", busy(done, async () => {
      if (!words.value.trim()) return words.focus();
      await send(node, { demonstration: words.value });
      node.demonstration = words.value;
      put(place);
      tell("Your reply waits for the trainer as a target of its own.");
      changed();
    }, tellBad));
    put(place, h("p", { class: "soft" }, "Write the reply that it should have been. The model is trained to give it."), words,
      h("div", { class: "row" }, done, button("Close", () => put(place))));
    keysOf(place, done, () => put(place));
    words.focus();
  }

  state.up = button("👍", null, { title: "Good reply (g)", class: "sign", "data-key": "g" });
  state.down = button("👎", null, { title: "Bad reply (b)", class: "sign", "data-key": "b" });
  state.up.addEventListener("click", busy(state.up, () => value(1), tellBad));
  state.down.addEventListener("click", busy(state.down, () => value(-1), tellBad));
  show();
  return { buttons: [state.up, state.down, button("It should have said…", rewrite, { class: "quiet" })], place };
}

function keysOf(place, done, close) {
  for (const words of place.querySelectorAll("textarea")) {
    words.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done.click();
      if (event.key === "Escape") { event.stopPropagation(); close(); }
    });
  }
}
