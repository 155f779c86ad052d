/* Whose learning the views show and steer: the policy that the operator chose in this tab, or the caller's own.
 *
 * Without the admin key the own policy is asked for first. A server on which one policy learns from all has none, and its
 * views need the admin key. */

import { asAdmin, asUser, askForEither, call, keys, query } from "./api.js";
import { h, put } from "./dom.js";

let chosen = ""; // "": the shared one
const listeners = new Set();

/** The query of the operator's routes for the chosen policy, with more fields. */
export const ofChosen = (fields = {}) => query({ ...fields, policy: chosen });

export function choose(policy) {
  if (policy === chosen) return;
  chosen = policy;
  for (const told of listeners) told();
}

/** Call `told` when another policy was chosen, until the signal ends. */
export function onChoice(told, signal) {
  listeners.add(told);
  signal?.addEventListener("abort", () => listeners.delete(told), { once: true });
}

/** Return the state of the caller's own policy; null where the operator's routes are to be asked. */
export async function ownPolicy(signal) {
  while (!keys.get("admin")) {
    try {
      return await (await call("v1/policy", { key: keys.get("chat"), signal })).json();
    } catch (error) {
      if (error.code === "shared_policy" || error.status === 503) return null;
      if (error.status === 404) throw Object.assign(error, { isFinal: true });
      if (error.status !== 401) throw error;
      keys.refuse("chat", keys.get("chat"));
      await askForEither();
    }
  }
  return null;
}

/** Act on the own policy, or on the chosen one: `rollback`, `pin`, `learning`. */
export const steer = (isOwn, act, body) => (isOwn
  ? asUser(`v1/policy/${act}`, { body })
  : asAdmin(`v1/admin/${act}`, { body: { ...body, policy: chosen || null } }));

/** Put a choice of policies into `place`, if the server has several and the caller is its operator. */
export async function choice(place, signal) {
  if (!keys.get("admin")) return;
  const { policies } = await asAdmin("v1/admin/policies", { signal });
  if (policies.length < 2) return;
  const told = ({ policy, serving, tip, waiting, learning }) =>
    `${nameOf(policy)} · v${serving}${tip === serving ? "" : ` → v${tip}`} · ${waiting} wait${learning ? "" : " · paused"}`;
  const select = h("select", { "aria-label": "Policy", on: { change: () => choose(select.value) } },
    policies.map((one) => h("option", { value: one.policy === "policy" ? "" : one.policy }, told(one))));
  select.value = chosen;
  put(place, select);
}

export const nameOf = (policy) => (policy === "policy" ? "shared" : policy.replace(/^user:/, ""));
