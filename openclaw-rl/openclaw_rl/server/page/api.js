/* The public API, and the keys of this tab. Every request of the page goes through `call`, to this server alone.
 *
 * Three kinds of callers: `user` has the chat key, or none where the server has none; `admin` has the admin key;
 * `reader` has the admin key if it was given, else the chat key. A key that is missing or refused is asked for once. */

import { askForKey } from "./keys.js";

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
    this.isFinal = code === "no_key"; // to ask again would be the same
  }
}

const NEEDS = { admin: "the admin key", chat: "your chat key", reader: "the admin key or your chat key" };
const KINDS = { admin: "openclaw-rl.admin", chat: "openclaw-rl.chat" };
const listeners = new Set();

export const keys = {
  get: (kind) => sessionStorage.getItem(KINDS[kind]) ?? "",
  put(kind, key) {
    if (key) sessionStorage.setItem(KINDS[kind], key);
    else sessionStorage.removeItem(KINDS[kind]);
    for (const told of listeners) told(kind);
  },
  /** Drop a refused key, unless another one was given meanwhile. */
  refuse(kind, key) {
    if (keys.get(kind) === key) keys.put(kind, "");
  },
  onChange: (told) => listeners.add(told),
};

function headers(key, body) {
  const found = { ...(key ? { authorization: `Bearer ${key}` } : {}) };
  return body === undefined ? found : { ...found, "content-type": "application/json" };
}

/** Send one request; throw ApiError with the server's own words unless it is answered with 2xx. */
export async function call(path, { key = "", method, body, signal, more = {} } = {}) {
  let reply;
  try {
    reply = await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: { ...headers(key, body), ...more },
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store", credentials: "omit", redirect: "error", signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.", 0, "away");
  }
  if (reply.ok) return reply;
  let told = null;
  try {
    told = (await reply.json()).error;
  } catch {
    told = null; // no JSON: a proxy in between
  }
  throw new ApiError(told?.message ?? `The server answered ${reply.status}.`, reply.status, told?.code ?? "");
}

/** Send a request with the caller's key, and ask for the key where it is needed or refused. */
async function keyed(caller, path, options) {
  for (let isNeeded = caller !== "chat", isRefused = false; ;) {
    const kind = caller !== "reader" ? caller : keys.get("admin") ? "admin" : "chat";
    const key = keys.get(kind);
    if (!key && isNeeded) {
      const given = await askForKey(caller, isRefused);
      if (!given) throw new ApiError(`This needs ${NEEDS[caller]}.`, 401, "no_key");
      keys.put(caller === "reader" ? await kindOf(given) : kind, given);
      continue;
    }
    try {
      return await call(path, { ...options, key });
    } catch (error) {
      if (error.status !== 401) throw error;
      [isNeeded, isRefused] = [true, key !== ""];
      keys.refuse(kind, key);
    }
  }
}

/** A key that may be either: the admin key opens the status. */
async function kindOf(key) {
  try {
    await call("v1/admin/status", { key });
    return "admin";
  } catch (error) {
    if (error.status === 401 || error.status === 403) return "chat";
    throw error;
  }
}

/** Ask for the admin key or a chat key, and keep it as what it is. */
export async function askForEither() {
  const given = await askForKey("reader", false);
  if (!given) throw new ApiError(`This needs ${NEEDS.reader}.`, 401, "no_key");
  keys.put(await kindOf(given), given);
}

async function json(reply) {
  return reply.json();
}

export const asAdmin = async (path, options) => json(await keyed("admin", path, options));
export const asUser = async (path, options) => json(await keyed("chat", path, options));
export const streamAsUser = (path, options) => keyed("chat", path, options);

/** Read with the admin key, or with the chat key where none was given. Without both, either is asked for. */
export const asReader = async (path, options) => json(await keyed("reader", path, options));

export function query(fields) {
  const kept = Object.entries(fields).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return kept.length ? `?${new URLSearchParams(kept)}` : "";
}
