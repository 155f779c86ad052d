/* Chat: stream a reply, stop it, edit a message or ask again (branches), rate, and see what became of each reply. */

import { asUser } from "./api.js";
import { button, h, put, repeat } from "./dom.js";
import { confirm } from "./confirm.js";
import { isOver, way } from "./fate.js";
import { watch } from "./pulse.js";
import { rating } from "./rate.js";
import { render } from "./text.js";
import { reply } from "./chat_stream.js";
import * as store from "./chat_store.js";

export const title = "Chat";
const LOOK_MS = 3000;
let draft = ""; // of a message that was not sent when another view was opened

export function show(root, { path: [id], signal, go }) {
  const chat = (id && store.open(id)) || store.create();
  const outcomes = new Map();
  const ways = new Map(); // turn → the place of its way
  const settled = new Set(); // turns that nothing more will happen to
  let news = 0, serving = null, isForgotten = false;
  let running = null; // the AbortController of the reply that streams

  const thread = h("div", { class: "thread", role: "log", "aria-label": "Messages" });
  const words = h("textarea", { id: "say", rows: 1, "aria-label": "Message", placeholder: "Say something…", set: { value: draft } });
  const sendButton = button("Send", () => (running ? running.abort() : send()), { class: "primary", id: "send" });
  const form = h("form", { class: "composer", on: { submit: (event) => { event.preventDefault(); send(); } } }, words, sendButton);
  const chats = h("aside", { class: "chats", "aria-label": "Chats" });
  put(root, h("div", { class: "chat" }, chats, h("section", { class: "talk" }, thread, form)));

  words.addEventListener("input", () => { draft = words.value; grow(); });
  words.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === "Escape" && running) running.abort();
  });
  signal.addEventListener("abort", () => running?.abort());
  thread.addEventListener("keydown", onKey);

  showChats();
  showThread();
  grow();
  if (matchMedia("(pointer: fine)").matches) words.focus();
  repeat(look, LOOK_MS, signal);
  watch(({ version }) => {
    if (serving !== null && version !== serving) lookAgain(settled); // a rollback takes back what was learned
    serving = version;
  }, signal);

  function grow() {
    words.style.setProperty("height", "auto");
    words.style.setProperty("height", `${Math.min(words.scrollHeight + 2, 240)}px`);
  }

  // -- the list of chats ----------------------------------------------------------------------------------------------

  function showChats() {
    const rows = store.list().map((one) => h("li", { class: one.id === chat.id ? "now" : null },
      h("a", { href: `#/chat/${one.id}`, "aria-current": one.id === chat.id ? "page" : null }, one.title || "New chat"),
      button("×", () => forget(one), { title: `Remove “${one.title}” from this browser`, class: "quiet" })));
    put(chats, h("details", { open: matchMedia("(min-width: 60rem)").matches },
      h("summary", {}, "Chats"),
      button("New chat", () => go("#/chat/new"), { class: "wide", title: "New chat (n)" }),
      h("ul", {}, rows)));
  }

  async function forget(one) {
    const agreed = await confirm(`Remove “${one.title || "New chat"}”?`, [
      "The chat is removed from this browser.",
      "The server keeps the turns that it recorded. “Forget this session”, in Turns, deletes those.",
    ], "Remove", { danger: true });
    if (!agreed) return;
    store.remove(one.id);
    isForgotten ||= one.id === chat.id; // the reply that streams is not to bring it back
    if (one.id === chat.id) go("#/chat/new");
    else showChats();
  }

  // -- the thread -----------------------------------------------------------------------------------------------------

  function showThread() {
    ways.clear();
    const shown = store.path(chat);
    put(thread, shown.length ? shown.map(message) : h("div", { class: "empty" },
      h("h1", {}, "Talk to it, and say what was wrong."),
      h("p", { class: "soft" }, "Your next message, or a 👍 or 👎, is the verdict on the reply before it. The model learns from it while you chat.")));
    thread.scrollTop = thread.scrollHeight;
  }

  function message(node) {
    return node.role === "user" ? ownMessage(node) : replyMessage(node);
  }

  function branches(node) {
    const all = store.siblings(chat, node), at = all.indexOf(node);
    if (all.length < 2) return null;
    const to = (step) => () => {
      if (running) return; // its parts are in the thread that is shown
      store.follow(chat, all[at + step]);
      keep();
      showThread();
    };
    return h("span", { class: "branches" },
      button("‹", to(-1), { title: "Earlier branch", disabled: at === 0 }),
      ` ${at + 1}/${all.length} `,
      button("›", to(1), { title: "Later branch", disabled: at === all.length - 1 }));
  }

  function ownMessage(node) {
    const body = h("div", { class: "bubble" }, node.text);
    const tools = h("div", { class: "tools" }, branches(node), button("Edit", edit, { class: "quiet", title: "Edit as a new branch (e)", "data-key": "e" }),
      node.id === chat.leaf && button("Ask again", () => { if (!running) answer(); }, { class: "quiet", title: "Ask again: the reply was lost (r)", "data-key": "r" }));
    const row = h("article", { class: "own", tabindex: 0, "aria-label": "You" }, body, tools);
    return row;

    function edit() {
      if (running) return;
      const field = h("textarea", { rows: 3, "aria-label": "Edit the message", set: { value: node.text } });
      const done = button("Send as a new branch", () => {
        if (!field.value.trim()) return;
        store.append(chat, node.parent, { role: "user", text: field.value.trim() });
        answer();
      }, { class: "primary" });
      put(row, field, h("div", { class: "row" }, done, button("Cancel", showThread)));
      field.addEventListener("keydown", (event) => {
        event.stopPropagation();
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done.click();
        if (event.key === "Escape") showThread();
      });
      field.focus();
    }
  }

  function replyMessage(node) {
    const parts = { thought: h("details", { class: "thought" }), text: h("div", { class: "text" }), foot: h("div", { class: "tools" }), way: h("div", {}) };
    const row = h("article", { class: "reply", tabindex: 0, "aria-label": "Reply", "data-turn": node.turn }, parts.thought, parts.text, parts.foot, parts.way);
    fill(node, parts);
    finish(node, parts);
    return row;
  }

  function fill(node, parts) {
    parts.thought.hidden = !node.thought;
    if (node.thought) {
      const isOpen = parts.thought.open;
      put(parts.thought, h("summary", {}, node.text ? "Thoughts" : "Thinking…"), h("div", { class: "soft pre" }, node.thought));
      parts.thought.open = isOpen;
    }
    const isEmpty = !node.text.trim() && !node.thought && !node.isRunning && !node.isStopped && !node.error;
    put(parts.text, isEmpty ? h("p", { class: "soft" }, "(empty reply)") : render(node.text));
  }

  function finish(node, parts) {
    if (node.isRunning) return put(parts.foot, h("span", { class: "soft" }, "…"));
    const again = button("Try again", () => { if (!running) { chat.leaf = node.parent; answer(); } }, { class: "quiet", title: "Another reply as a branch (r)", "data-key": "r" });
    const version = node.version === null || node.version === undefined ? null
      : h("a", { class: "badge", href: `#/versions/${node.version}`, title: "The version that sampled this reply" }, `v${node.version}`);
    const note = node.error ? h("span", { class: "bad" }, node.error) : node.isStopped ? h("span", { class: "soft" }, "stopped") : null;
    if (!node.turn || node.error) return put(parts.foot, branches(node), version, note, again);
    const said = h("p", { class: "said" });
    const tellSaid = () => { said.textContent = node.comment ? `You said: ${node.comment}` : ""; };
    const rate = rating(node, () => { keep(); tellSaid(); lookAgain([node.turn]); });
    tellSaid();
    put(parts.foot, branches(node), version, note, rate.buttons, again,
      h("a", { class: "quiet", href: `#/turns/${encodeURIComponent(node.turn)}` }, "Details"));
    const place = h("div", { class: "fate" });
    put(parts.way, said, rate.place, place);
    ways.set(node.turn, place);
    showWay(node.turn);
  }

  // -- one reply ------------------------------------------------------------------------------------------------------

  async function send() {
    const text = words.value.trim();
    if (!text || running) return;
    words.value = draft = "";
    grow();
    store.append(chat, chat.leaf, { role: "user", text });
    await answer();
  }

  /** Keep the chat in this browser, at an address that a reload finds. */
  function keep() {
    if (isForgotten) return;
    store.save(chat);
    if (!signal.aborted && location.hash !== `#/chat/${chat.id}`) history.replaceState(null, "", `#/chat/${chat.id}`);
  }

  async function answer() {
    keep(); // before the reply: a reload while it streams loses no message
    const node = store.append(chat, chat.leaf, { role: "assistant", text: "", thought: "", version: null, turn: null, rated: null, isRunning: true });
    const asked = store.path(chat).slice(0, -1).filter((one) => one.role === "user" || one.text)
      .map((one) => ({ role: one.role, content: one.text }));
    showThread();
    const row = thread.lastElementChild;
    const parts = { thought: row.children[0], text: row.children[1], foot: row.children[2], way: row.children[3] };
    running = new AbortController();
    setRunning(true);
    let isDue = false;
    try {
      for await (const piece of reply(asked, chat.session, running.signal)) {
        if (piece.turn) Object.assign(node, { version: piece.version, turn: piece.isRecorded ? piece.turn : null });
        if (piece.thought) node.thought += piece.thought;
        if (piece.text) node.text += piece.text;
        if (!isDue) {
          isDue = true;
          requestAnimationFrame(() => { isDue = false; draw(node, parts); });
        }
      }
    } catch (error) {
      if (error.name === "AbortError") node.isStopped = true;
      else node.error = error.message;
    }
    running = null;
    delete node.isRunning;
    if (node.error && !node.text && !node.thought) node.turn = null;
    keep();
    if (signal.aborted) return;
    setRunning(false);
    row.dataset.turn = node.turn ?? "";
    draw(node, parts);
    finish(node, parts);
    showChats();
    look();
  }

  function draw(node, parts) {
    const isAtEnd = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
    fill(node, parts);
    if (isAtEnd) thread.scrollTop = thread.scrollHeight;
  }

  function setRunning(isOn) {
    put(sendButton, isOn ? "Stop" : "Send");
    sendButton.classList.toggle("danger", isOn);
    thread.setAttribute("aria-busy", String(isOn));
  }

  // -- what became of the replies -------------------------------------------------------------------------------------

  async function look() {
    const wanted = [...ways.keys()].filter((turn) => !settled.has(turn)).slice(-50), asked = news;
    if (!wanted.length) return;
    const found = await asUser(`v1/outcomes?${new URLSearchParams(wanted.map((turn) => ["turn_id", turn]))}`, { signal });
    for (const outcome of found.outcomes) {
      outcomes.set(outcome.turn_id, outcome);
      if (isOver(outcome) && asked === news) settled.add(outcome.turn_id); // else the answer may be older than the news
      showWay(outcome.turn_id);
    }
  }

  /** Look at turns that were settled: a rating revives a reply, a rollback takes one back. */
  function lookAgain(turns) {
    news += 1;
    for (const turn of [...turns]) settled.delete(turn);
    look().catch(() => undefined); // it is repeated
  }

  function showWay(turn) {
    const outcome = outcomes.get(turn), place = ways.get(turn);
    if (outcome && place) put(place, way(outcome));
  }

  // -- keys -----------------------------------------------------------------------------------------------------------

  function onKey(event) {
    if (event.target.closest("textarea, input") || event.ctrlKey || event.metaKey || event.altKey) return;
    const row = event.target.closest("article");
    if (!row) return;
    if (event.key === "j" || event.key === "k") {
      const next = event.key === "j" ? row.nextElementSibling : row.previousElementSibling;
      next?.focus();
      event.preventDefault();
      return;
    }
    const tool = row.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    if (tool) { event.preventDefault(); tool.click(); }
  }
}
