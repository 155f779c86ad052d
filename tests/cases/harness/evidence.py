"""Evidence for a case's checks: clients' answers, the ledger's turns and samples, the stubs' calls, metrics."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from harness.host import Server
from harness.model import Vocabulary
from harness.play import Seen
from harness.stubs import Stubs, TeacherCall

_HAS_TEXT = re.compile(r'"content": ?"[^"]')


def evidence(server: Server, seen: Sequence[Seen], stubs: Stubs, vocabulary: Vocabulary) -> dict[str, Any]:
    rows = server.admin("/v1/turns?limit=500")["turns"]
    records = [server.admin(f"/v1/turns/{row['turn_id']}") for row in rows]
    records.sort(key=lambda record: record["request"]["received_at"])
    turns = [_turn(record, vocabulary) for record in records]
    samples = [_sample(record) for record in records if record["sample"] is not None]
    calls = [_call(call, one) for call, one in zip(stubs.calls, _asked(seen, len(stubs.calls)), strict=False)]
    return clients(seen) | {
        "turn": turns,
        "turns": turns,
        "sample": samples,
        "samples": samples,
        "engine": {"calls": calls},
        "judge": {"calls": [{"prompt": call.prompt, "material": call.prompt} for call in stubs.judged]},
        "teacher": {"calls": _hinted(stubs.scored, turns)},
        "metrics": _metrics(server) | {"inflight": server.admin("/v1/admin/status")["counts"]["running"]},
        "proc": {"log": server.log},
        "all_bodies": "\n".join(one.body + json.dumps(one.headers) for one in seen),
        "beside_the_largest": _beside_the_largest(seen),
        "turn_or_error": [turns[i] if i < len(turns) else one.json for i, one in enumerate(seen)],
    }


def clients(seen: Sequence[Seen]) -> dict[str, Any]:
    """Answers of the clients."""
    return {"resp": [_response(one) for one in seen], "sse": [_stream(one) for one in seen if one.is_stream]}


def _beside_the_largest(seen: Sequence[Seen]) -> dict[str, Any]:
    """Return the signs of life for the other clients until the largest request had its answer.

    They are the number of answers of `/healthz`, and the longest silence of all, as a share of the time since the first
    sign.
    """
    largest = max(seen, key=lambda one: len(json.dumps(one.request.get("body"))))
    end, others = largest.heard_at[-1], [one for one in seen if one is not largest]
    heard = [at for at in sorted(at for one in others for at in one.heard_at) if at < end]
    gaps = [later - at for at, later in pairwise([*heard, end])]
    return {
        "health_answers": sum(one.heard_at[-1] < end for one in others if one.request["path"] == "/healthz"),
        "silence": max(gaps) / (end - heard[0]) if heard else 1.0,
    }


def _asked(seen: Sequence[Seen], calls: int) -> list[Seen | None]:
    """Return the request behind each engine call, as far as they came one by one."""
    found: list[Seen | None] = [one for one in seen if one.request.get("parallel_group") is None]
    return found + [None] * calls


def _hinted(calls: Sequence[TeacherCall], turns: Sequence[Any]) -> list[dict[str, Any]]:
    """The teacher's calls; those for the student's side have the prompt that was served."""
    served = [turn["prompt_ids"] + turn["response_ids"] for turn in turns]
    return [{"input_ids": call.input_ids, "text": call.text} for call in calls if call.input_ids not in served]


def _turn(record: Any, vocabulary: Vocabulary) -> dict[str, Any]:
    turn, prompt = record["turn"], record["request"]["prompt_ids"]
    return {
        "turn_id": turn["turn_id"],
        "prompt_ids": prompt,
        "prompt_text": vocabulary.text(prompt),
        "prompt_special_token_count": vocabulary.controls(prompt),
        "response_ids": turn["response_ids"],
        "logprobs": turn["rollout_log_probs"],
        "truncated": turn["finish_reason"] == "length",
        "trainable": turn["drop"] is None,
        "drop_reason": record["reason"],
        "session_id": record["request"]["scope"]["session_id"],
        "said_at": {event["state"]: event["at"] for event in record["events"]},
    }


def _sample(record: Any) -> dict[str, Any]:
    sample, messages = record["sample"], record["next_state"]["messages"]
    return {
        "turn_id": record["turn"]["turn_id"],
        "request_text": record["request"]["messages"][-1]["content"],
        "response_ids": sample["response_ids"],
        "teacher_logprobs": sample["teacher_log_probs"],
        "next_state": messages,
        "next_state_text": "\n".join(str(message["content"]) for message in messages),
    }


def _call(call: Any, asked: Seen | None) -> dict[str, Any]:
    left = asked.left_at if asked is not None else None
    return {
        "input_ids": call.input_ids,
        "max_new_tokens": call.max_new_tokens,
        "output_ids": call.output_ids,
        "output_logprobs": call.output_logprobs,
        "made_after_leaving": None if not call.is_aborted or left is None else sum(at > left for at in call.made_at),
        "prompt_tokens": len(call.input_ids),
    }


def _response(one: Seen) -> dict[str, Any]:
    return {
        "status": one.status,
        "headers": {name.lower(): value for name, value in one.headers.items()},
        "body": one.body,
        "json": one.json,
        "elapsed_s": one.elapsed_s,
    }


def _stream(one: Seen) -> dict[str, Any]:
    blocks = one.body.split("\n\n")
    lines = [block[6:] for block in blocks if block.startswith("data: ")]
    chunks: list[Any] = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    deltas = [choice["delta"] for choice in choices]
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"id": part.get("id"), "function": {"name": "", "arguments": ""}})
            for name, text in part["function"].items():
                call["function"][name] += text or ""
    return {
        "status": one.status,
        "signs_before_text": next((i for i, one in enumerate(blocks) if _HAS_TEXT.search(one)), len(blocks)),
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "content_deltas": sum(bool(delta.get("content")) for delta in deltas),
        "reasoning": "".join(delta.get("reasoning_content") or "" for delta in deltas),
        "finish_reasons": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "tool_calls": [calls[index] for index in sorted(calls)],
        "tool_call_indexes": list(calls),
        "usage": next((chunk["usage"] for chunk in chunks if chunk.get("usage")), None),
        "done_last": bool(lines) and lines[-1] == "[DONE]",
    }


def _metrics(server: Server) -> Mapping[str, Any]:
    text = server.admin("/metrics")
    found = {what: float(value) for what, value in re.findall(r'what="([^"]+)"} (\S+)', text)}
    failures = sum(value for what, value in found.items() if what.startswith("judge") or what == "dropped.unjudged")
    return found | {"judge_failures": failures}
