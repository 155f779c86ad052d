/* Wishes: what you asked for in words, how much of it is learned, and where it was asked. */

import { asUser } from "./api.js";
import { busy, button, h, many, nothing, number, percent, put, repeat, when } from "./dom.js";
import { confirm, tell, tellBad } from "./confirm.js";

export const title = "Wishes";
const LOOK_MS = 4000;

export function show(root, { path: [wanted], signal }) {
  const list = h("ul", { class: "cards" });
  put(root, h("header", { class: "head" }, h("h1", {}, "Wishes"),
    h("p", { class: "soft" }, "A correction in your own words becomes a wish. While nobody chats, the model practises it.")), list);
  let shown = "", isFirst = true, looks = 0;

  async function look() {
    const mine = (looks += 1);
    const { wishes } = await asUser("v1/wishes", { signal });
    if (mine !== looks) return; // a newer look is under way: this answer may be from before an act
    const now = JSON.stringify(wishes);
    if (now === shown) return;
    shown = now;
    const had = list.contains(document.activeElement) ? document.activeElement : null; // the focus, and what is unfolded, stay
    const focused = had?.closest("[data-wish]")?.dataset.wish;
    const unfolded = Array.from(list.querySelectorAll("details[open]"), (one) => one.closest("[data-wish]").dataset.wish);
    put(list, wishes.length ? [...wishes].reverse().sort(byState).map(card) : h("li", { class: "empty soft" },
      "No wish yet. Say what was wrong with a reply, in a whole sentence: “No, that is too long. Please answer in one sentence.”"));
    const place = list.querySelector(`[data-wish="${focused ?? (isFirst ? wanted ?? "" : "")}"]`);
    const same = had && !had.matches("[data-wish]") && place?.querySelector(had.tagName.toLowerCase());
    (same || place)?.focus();
    for (const id of unfolded) list.querySelector(`[data-wish="${id}"] details`)?.setAttribute("open", "");
    isFirst = false;
  }

  function card(wish) {
    const isActive = wish.state === "active";
    const remove = button("Remove", null, { class: "quiet danger" });
    remove.addEventListener("click", busy(remove, () => removeIt(wish), tellBad));
    const again = button("Practise again", null, {});
    again.addEventListener("click", busy(again, () => change(wish, { practise: true }, "It is practised again."), tellBad));
    const general = h("input", { type: "checkbox", set: { checked: wish.is_general } });
    general.addEventListener("change", busy(general, async () => {
      const { checked } = general;
      try {
        await change(wish, { general: checked }, checked ? "It holds for every prompt now." : "It holds where it was asked.");
      } catch (error) {
        general.checked = wish.is_general; // nothing changed
        throw error;
      }
    }, tellBad));
    return h("li", { class: `card ${isActive ? "" : "over"}`, "data-wish": wish.wish_id, tabindex: -1 },
      h("p", { class: "words" }, wish.text),
      learned(wish),
      h("p", { class: "soft" }, `Wish ${wish.wish_id} · ${when(wish.created_at)} · `, state(wish)),
      h("details", {}, h("summary", {}, `Asked in ${many(wish.sources.length, "turn")}`),
        h("ul", { class: "plain" }, wish.sources.map((source) => h("li", { class: source.is_over ? "soft" : null },
          h("a", { href: `#/turns/${encodeURIComponent(source.turn_id)}` }, source.text),
          source.is_held_back ? " · held back: what is learned is measured on it" : ` · ${many(source.practised, "practice reply", "practice replies")}`,
          source.is_over && " · a newer wish corrected this prompt")))),
      h("div", { class: "row" },
        h("label", { class: "choice" }, general, " For every prompt"),
        isActive ? (wish.rests && again) : wish.state !== "superseded" && again,
        isActive && remove));
  }

  function learned(wish) {
    const share = wish.learned;
    return h("div", { class: "learned" },
      h("progress", { max: 1, value: share ?? 0, "aria-label": `Learned share of wish ${wish.wish_id}` }),
      h("b", {}, share === null ? "not measured yet" : `learned ${percent(share)}`),
      wish.kl !== null && h("span", { class: "soft", title: "KL to the base of its newest practice replies, nats a token" }, `KL ${number(wish.kl, 2)}`));
  }

  function state(wish) {
    if (wish.state === "superseded") return ["superseded: ", wish.reason];
    if (wish.state !== "active") return [wish.state, ": ", wish.reason];
    const done = wish.updates ? `practised ${many(wish.practised, "reply", "replies")} in ${many(wish.updates, "update")} since version ${wish.since}` : "waits for a quiet moment";
    return wish.rests ? `${done}; rests: ${wish.rests}` : done;
  }

  async function change(wish, body, told) {
    await asUser(`v1/wishes/${wish.wish_id}`, { body });
    tell(told);
    await look();
  }

  async function removeIt(wish) {
    const agreed = await confirm(`Remove “${wish.text}”?`, [
      "No practice rehearses it any more, and practice that waits for it is dropped.",
      "What was learned of it stays in the weights.",
    ], "Remove", { danger: true });
    if (!agreed) return;
    await asUser(`v1/wishes/${wish.wish_id}`, { method: "DELETE" });
    tell("The wish is removed.");
    await look();
  }

  repeat(look, LOOK_MS, signal, (error) => put(list, nothing(error.message)));
}

const ORDER = ["active", "stopped", "removed", "superseded"];
const byState = (a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || b.wish_id - a.wish_id;
