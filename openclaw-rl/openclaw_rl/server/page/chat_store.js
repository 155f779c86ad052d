/* Chats of this browser: each is a tree of messages, because an edited message and a new reply are branches.
 *
 * They are kept in the browser's storage, the newest 50. The server keeps what it recorded, under the chat's session. */

const INDEX = "openclaw-rl.chats", ONE = "openclaw-rl.chat.";
const MOST = 50;

const read = (name, otherwise) => {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // no storage, or another program's content
  }
};

/** Keep the text, and drop the oldest chats while there is no room. */
function write(name, value) {
  for (let tries = 0; tries < MOST; tries += 1) {
    try {
      localStorage.setItem(name, JSON.stringify(value));
      return;
    } catch {
      const oldest = list().at(-1);
      if (!oldest || ONE + oldest.id === name) return; // the chat goes on, unkept
      remove(oldest.id);
    }
  }
}

/** Names and titles of the chats, the newest first. */
export const list = () => read(INDEX, []);

export function open(id) {
  const chat = read(ONE + id, null);
  if (!chat?.nodes) return null;
  for (const node of Object.values(chat.nodes)) {
    if (!node.isRunning) continue;
    delete node.isRunning; // the page was closed while it streamed
    node.isStopped = true;
  }
  return chat;
}

const name = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export function create() {
  const id = name();
  return { id, session: `page-${id}`, title: "", leaf: null, count: 0, nodes: {} };
}

export function save(chat) {
  const others = list().filter((one) => one.id !== chat.id);
  for (const old of others.slice(MOST - 1)) localStorage.removeItem(ONE + old.id);
  write(ONE + chat.id, chat);
  write(INDEX, [{ id: chat.id, title: chat.title, at: Date.now() / 1000 }, ...others.slice(0, MOST - 1)]);
}

export function remove(id) {
  try {
    localStorage.removeItem(ONE + id);
    localStorage.setItem(INDEX, JSON.stringify(list().filter((one) => one.id !== id)));
  } catch {
    return; // no storage: there is nothing to remove
  }
}

/** Add a message below `parent` (null: a first one) and make it the end of the shown branch. */
export function append(chat, parent, message) {
  chat.count += 1;
  const node = { ...message, id: `n${chat.count}`, parent };
  chat.nodes[node.id] = node;
  chat.leaf = node.id;
  if (!chat.title && message.role === "user") chat.title = message.text.trim().slice(0, 60);
  return node;
}

export function discard(chat, node) {
  chat.leaf = node.parent;
  delete chat.nodes[node.id];
}

/** The shown branch, from the first message on. */
export function path(chat) {
  const found = [];
  for (let at = chat.nodes[chat.leaf]; at; at = chat.nodes[at.parent]) found.unshift(at);
  return found;
}

const children = (chat, parent) => Object.values(chat.nodes).filter((node) => node.parent === parent);

/** The branches at a message: itself and its siblings, in the order in which they were made. */
export function siblings(chat, node) {
  return children(chat, node.parent);
}

/** Show the branch of this message, down to its newest end. */
export function follow(chat, node) {
  let at = node;
  for (let below = children(chat, at.id); below.length; below = children(chat, at.id)) at = below.at(-1);
  chat.leaf = at.id;
}
