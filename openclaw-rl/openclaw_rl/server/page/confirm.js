/* Dialogs of the page: one question before an act, and the line at the foot that tells what happened. */

import { button, h } from "./dom.js";

/** Ask once. `says`: what will happen, one sentence each. Return false, or true with the choices that were ticked. */
export function confirm(title, says, act, { danger = false, choices = {} } = {}) {
  const boxes = Object.entries(choices).map(([name, label]) =>
    [name, h("input", { type: "checkbox", name }), label]);
  const dialog = h("dialog", { class: "ask", "aria-labelledby": "ask-title" },
    h("form", { method: "dialog" },
      h("h2", { id: "ask-title" }, title),
      h("ul", { class: "says" }, says.map((line) => h("li", {}, line))),
      boxes.map(([, box, label]) => h("label", { class: "choice" }, box, " ", label)),
      h("footer", {},
        button("Cancel", () => dialog.close("no")), // no submit button: Enter would press the first one
        h("button", { value: "yes", class: danger ? "primary danger" : "primary" }, act))));
  document.body.append(dialog);
  dialog.showModal();
  dialog.querySelector("button[value=yes]").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const agreed = dialog.returnValue === "yes";
      const ticked = Object.fromEntries(boxes.map(([name, box]) => [name, box.checked]));
      dialog.remove();
      resolve(agreed && { ...ticked });
    });
  });
}

let hides = 0;

/** Tell the outcome of an act, for some seconds. */
export function tell(text, isBad = false) {
  const place = document.getElementById("told");
  place.textContent = text;
  place.classList.toggle("bad", isBad);
  place.hidden = false;
  clearTimeout(hides);
  hides = setTimeout(() => { place.hidden = true; }, isBad ? 12000 : 5000);
}

export const tellBad = (text) => tell(text, true);
