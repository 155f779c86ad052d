/* The dialog that asks for a key. It asks once at a time: requests that wait for the same key share one answer. */

import { button, h } from "./dom.js";

const TEXTS = {
  admin: ["Admin key", "It is in keys/admin.key of the data directory; `openclaw-rl page` brings it here by itself."],
  reader: ["Admin key or chat key", "The admin key (keys/admin.key of the data directory) shows every turn; a chat key shows your own."],
  chat: ["Chat key", "This server has chat keys (server.api_keys). Yours shows your own chats, turns and wishes."],
};
const asked = new Map();

/** Return the key, or "" when the dialog was closed. `refused`: the last one was wrong. */
export function askForKey(kind, refused) {
  if (!asked.has(kind)) asked.set(kind, ask(kind, refused).finally(() => asked.delete(kind)));
  return asked.get(kind);
}

function ask(kind, refused) {
  const [title, where] = TEXTS[kind];
  const input = h("input", { type: "password", autocomplete: "off", required: true, id: "key", "aria-label": title });
  const dialog = h("dialog", { class: "ask", "aria-labelledby": "key-title" },
    h("form", { method: "dialog" },
      h("h2", { id: "key-title" }, title),
      refused && h("p", { class: "bad", role: "alert" }, "That key was refused."),
      h("p", { class: "soft" }, where, " It stays in this tab."),
      input,
      h("footer", {},
        button("Cancel", () => dialog.close("no")), // no submit button: Enter would press the first one
        h("button", { value: "yes", class: "primary" }, "Use it"))));
  document.body.append(dialog);
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const key = dialog.returnValue === "yes" ? input.value.trim() : "";
      dialog.remove();
      resolve(key);
    });
  });
}
