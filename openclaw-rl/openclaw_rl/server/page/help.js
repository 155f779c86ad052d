/* The keys of the page, in a dialog. */

import { h } from "./dom.js";

const KEYS = [
  ["1 … 6", "Chat, Wishes, Turns, Versions, Curves, State"],
  ["n", "new chat"],
  ["/", "to the message, or to the search of turns"],
  ["j  k", "next and previous message or row"],
  ["g  b", "rate the chosen reply good or bad"],
  ["r  e", "another reply; edit the chosen message"],
  ["Enter", "send, or open the chosen row"],
  ["Shift Enter", "a line break"],
  ["Esc", "stop the reply, close a dialog"],
  ["?", "this list"],
];

export function help() {
  if (document.querySelector("dialog[open]")) return;
  const dialog = h("dialog", { class: "ask", "aria-labelledby": "help-title" }, h("form", { method: "dialog" },
    h("h2", { id: "help-title" }, "Keys"),
    h("dl", { class: "facts" }, KEYS.map(([key, does]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, does)])),
    h("footer", {}, h("button", { class: "primary", autofocus: true }, "Close"))));
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}
