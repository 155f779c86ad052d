/* One reply over `/v1/chat/completions`, as it streams. */

import { ApiError, streamAsUser } from "./api.js";

/** Ask for a reply and yield what comes: {turn, version, isRecorded} first, then {text} and {thought} pieces, and
 *  {finish}. Throws ApiError; the signal aborts the reply on the engine too. */
export async function* reply(messages, session, signal) {
  const answer = await streamAsUser("v1/chat/completions", {
    body: { messages, stream: true },
    more: { "x-session-id": session },
    signal,
  });
  const version = answer.headers.get("x-weight-version");
  const head = {
    version: version === null ? null : Number(version),
    isRecorded: answer.headers.get("x-openclaw-recorded") !== "false",
  };
  let isFirst = true;
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, 0, event.error.code);
    if (isFirst) yield { ...head, turn: event.id };
    isFirst = false;
    const choice = event.choices?.[0];
    if (!choice) continue;
    if (choice.delta?.reasoning_content) yield { thought: choice.delta.reasoning_content };
    if (choice.delta?.content) yield { text: choice.delta.content };
    if (choice.finish_reason) yield { finish: choice.finish_reason };
  }
  throw new ApiError("The reply broke off.", 0, "cut");
}

/** The data of each event of a stream; comments (keep-alives) are skipped. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (lines.length) yield lines.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
