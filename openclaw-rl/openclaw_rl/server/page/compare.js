/* One prompt to two versions, side by side. Nothing of it is recorded or learned from. */

import { asAdmin } from "./api.js";
import { busy, button, h, many, put } from "./dom.js";
import { tellBad } from "./confirm.js";
import { render } from "./text.js";

let prompt = ""; // kept while other views are looked at

/** `versions`: those that may answer, newest first; `serving`: the one that serves. */
export function comparison(versions, serving) {
  const older = versions.find((one) => one.weight_version < serving)?.weight_version ?? 0;
  const pick = (label, value) => {
    const select = h("select", { "aria-label": label }, versions.map((one) =>
      h("option", { value: one.weight_version }, `version ${one.weight_version}${one.weight_version === serving ? " (serves)" : one.weight_version === 0 ? " (base)" : ""}`)));
    select.value = String(value);
    return select;
  };
  const left = pick("Left version", older), right = pick("Right version", serving);
  const words = h("textarea", { rows: 2, "aria-label": "Prompt", placeholder: "Give me three tips to sleep better.", set: { value: prompt } });
  const out = h("div", { class: "side" });
  const ask = button("Compare", null, { class: "primary" });
  words.addEventListener("input", () => { prompt = words.value; });
  words.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask.click(); });
  ask.addEventListener("click", busy(ask, async () => {
    if (!words.value.trim()) return words.focus();
    const numbers = [Number(left.value), Number(right.value)];
    put(out, numbers.map((one) => h("section", {}, h("h3", {}, `Version ${one}`), h("p", { class: "soft" }, "…"))));
    try {
      const { replies } = await asAdmin("v1/admin/compare", { body: { prompt: words.value.trim(), versions: numbers } });
      put(out, replies.map((one) => h("section", {}, h("h3", {}, `Version ${one.weight_version}`, h("span", { class: "soft" }, one.is_cut ? ` cut after ${many(one.tokens, "token")}` : ` ${many(one.tokens, "token")}`)),
        h("div", { class: "text" }, render(one.text)))));
    } catch (error) {
      put(out);
      throw error;
    }
  }, tellBad));
  return h("section", { class: "compare" }, h("h2", {}, "Side by side"),
    h("p", { class: "soft" }, "The same prompt to two versions, without chance in the sampling. Nothing of it is recorded."),
    words, h("div", { class: "row" }, left, right, ask), out);
}
