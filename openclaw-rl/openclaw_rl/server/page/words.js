/* The server's terms in words for people. */

export const REASONS = {
  no_next_state: "nobody answered it, and nobody rated it",
  superseded: "another try of this reply was continued",
  branch: "another continuation of the chat came first",
  cancelled: "it was stopped before its end",
  neutral: "the verdict is neutral: there is nothing to learn",
  unjudged: "the judge gave no verdict",
  not_trainable_sampling: "it was sampled in a way that cannot be trained on",
  truncated_sampling: "it was sampled with top_p or top_k",
  misaligned: "the engine's tokens and log-probs do not fit",
  non_finite: "a log-prob is not a number",
  empty: "it has no token to train on",
  unsupported_content: "it has pictures, and this trainer or method does not take them",
  opted_out: "it was left out of training",
  redacted: "it holds a secret: only masked text was kept",
  record_only: "learning was off",
  engine_failed: "the engine failed in the middle of it",
  refused: "the engine refused it",
  not_recorded: "it could not be recorded",
  interrupted: "the server stopped before its end",
  stale: "it is too many versions old",
  rolled_back: "its version was rolled back",
  gate_rejected: "the gate refused the step that trained on it",
  too_long: "it is longer than the trainer takes",
  method: "the method had no use for it",
  backlog: "too many turns waited",
  wish_over: "its wish is over",
  eval: "its episode only evaluates",
  episode_aborted: "the environment of its episode failed",
  episode_expired: "its episode got no outcome in time",
  group_too_small: "fewer than two episodes of its group ended",
  no_contrast: "all that it is compared with got the same reward",
};

export const STATES = {
  served: "waits for the next message or a rating",
  paired: "waits for the judge",
  judged: "waits for the method",
  sampled: "waits for a full batch",
  leased: "is being trained on",
  trained: "was learned from",
  dropped: "was left out",
};

export const VERSION_STATES = {
  candidate: "waits for the gate",
  gated: "passed the gate",
  loading: "is being loaded",
  serving: "serves",
  retired: "served before",
  rejected: "refused by the gate",
  rolled_back: "rolled back",
  superseded: "passed over for a newer one",
  lost: "its file is lost",
};

export const SOURCES = { rules: "the rules", llm: "the judge model", feedback: "you" };

export const reason = (name) => REASONS[name] ?? String(name ?? "").replaceAll("_", " ");
export const verdictWord = (value) => (value > 0 ? "good" : value < 0 ? "bad" : "neutral");

export function sourceWord(source, isOperator = false) {
  return source === "feedback" && isOperator ? "feedback" : SOURCES[source] ?? source ?? "";
}
