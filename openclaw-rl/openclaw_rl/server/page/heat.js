/* Credit per token of a reply, as a heat map: green tokens are made likelier, red ones less likely. */

import { h, number, signed } from "./dom.js";

const FULL = 3; // nats at which a colour is full

/** `found`: the answer of `/v1/turns/ID/tokens`. */
export function heat(found) {
  const { tokens, reward, has_gap: hasGap, is_demonstration: isWritten } = found;
  const means = isWritten ? "The user's own reply: every trained token is a target, and is made likelier." : hasGap
    ? "Gap of each token: the log-prob by the teacher, which read the hint, minus the student's."
    : reward === null ? "No credit: the turn has no sample." : "The verdict gives every trained token the same credit.";
  const isMixed = new Set(tokens.map((token) => token.weight_version)).size > 1;
  const spans = tokens.map((token, at) => {
    const credit = !token.is_trained ? null : isWritten ? 1 : hasGap ? token.gap : reward;
    const size = credit === null ? 0 : Math.min(1, Math.abs(credit) / (hasGap ? FULL : 2));
    const facts = [
      `token ${at + 1}`,
      !token.is_trained ? "not trained on" : isWritten ? "a target" : credit === null ? "no credit" : `credit ${signed(credit)}`,
      !isWritten && `log-prob ${number(token.log_prob)}`,
      isMixed && `version ${token.weight_version}`,
    ].filter(Boolean);
    return h("span", {
      class: `token ${credit > 0 ? "up" : credit < 0 ? "down" : ""} ${token.is_trained ? "" : "given"}`,
      css: { "--heat": `${Math.round(100 * size)}%` }, title: facts.join(" · "),
    }, visible(token.text));
  });
  return h("figure", { class: "heat" },
    h("div", { class: "tokens", tabindex: 0, role: "img", "aria-label": `${means} ${sum(tokens, hasGap, reward)}` }, spans),
    h("figcaption", { class: "soft" }, means, " ", sum(tokens, hasGap, reward),
      h("span", { class: "legend", "aria-hidden": "true" },
        h("span", { class: "token down", css: { "--heat": "100%" } }, `≤ −${hasGap ? FULL : 2}`),
        h("span", { class: "token" }, "0"),
        h("span", { class: "token up", css: { "--heat": "100%" } }, `≥ ${hasGap ? FULL : 2}`))));
}

function sum(tokens, hasGap, reward) {
  if (!hasGap) return reward === null ? "" : `Reward ${signed(reward)}.`;
  const gaps = tokens.filter((token) => token.is_trained && token.gap !== null).map((token) => token.gap);
  const mean = gaps.reduce((total, gap) => total + gap, 0) / (gaps.length || 1);
  return `Mean ${signed(mean)} nats over ${gaps.length} tokens${reward === null ? "" : `, reward ${signed(reward)}`}.`;
}

/** A token's text with its line breaks to be seen. */
const visible = (text) => text.replaceAll("\n", "⏎\n");
