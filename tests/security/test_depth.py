"""Bodies of some kilobytes that are nested deep: each is refused in OpenAI's form, or served and can be read again."""

import json
from contextlib import closing
from typing import Any

import pytest

from openclaw_rl.ledger import audit
from openclaw_rl.ledger import open as ledger_open
from openclaw_rl.ledger.snapshot import backup

DEEP = "<deep>"
"""Stands for the nested value."""
ASKED = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": ASKED}
KINDS = {"object": ('{"a":', "}"), "list": ("[", "]"), "both": ('[{"a":', "}]")}


def called(arguments: object, **more: object) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}
    return [
        *ASKED,
        {"role": "assistant", "content": "x", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]


def tool(**more: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}} | more}


CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "arguments as an object": ({"messages": called(DEEP)}, "messages[1]"),
    "a field of a call": ({"messages": called("{}", extra=DEEP)}, "messages[1]"),
    "a field of a message": ({"messages": [ASKED[0] | {"extra": DEEP}]}, "messages[0]"),
    "a field of a part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "extra": DEEP}]}]},
        "messages[0]",
    ),
    "a content": ({"messages": [{"role": "user", "content": DEEP}]}, "messages[0]"),
    "the parameters of a tool": (CHAT | {"tools": [tool(parameters=DEEP)]}, "tools[0]"),
    "a field of a tool": (CHAT | {"tools": [tool(), tool(name="g", extra=DEEP)]}, "tools[1]"),
    "chat_template_kwargs": (CHAT | {"chat_template_kwargs": {"x": DEEP}}, "chat_template_kwargs"),
    "a schema of a reply": (
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"x": DEEP}}}},
        "response_format",
    ),
    "tool_choice": (CHAT | {"tool_choice": DEEP}, "tool_choice"),
    "functions": (CHAT | {"functions": DEEP}, "functions"),
    "logit_bias": (CHAT | {"logit_bias": {"5": DEEP}}, "logit_bias"),
    "stop": (CHAT | {"stop": DEEP}, "stop"),
    "reasoning_effort": (CHAT | {"reasoning_effort": DEEP}, "reasoning_effort"),
    "stream_options": (CHAT | {"stream_options": {"x": DEEP}}, "stream_options"),
}
NOT_READ: dict[str, dict[str, Any]] = {
    name: CHAT | {name: DEEP} for name in ("metadata", "user", "session_id", "prompt_cache_key", "task", "step")
}
OTHERS = {
    "feedback": ("/v1/feedback", "ann", {"turn_id": "t", "value": DEEP}),
    "feedback, another field": ("/v1/feedback", "ann", {"turn_id": "t", "value": True, "x": DEEP}),
    "wishes": ("/v1/wishes/1", "ann", {"general": DEEP}),
    "pin": ("/v1/admin/pin", "admin", {"weight_version": DEEP}),
    "rollback": ("/v1/admin/rollback", "admin", {"to": DEEP}),
    "forget": ("/v1/admin/forget", "admin", {"turn_id": DEEP}),
    "lease": ("/v1/trainer/lease", "trainer", {"x": DEEP}),
    "commit": ("/v1/trainer/commit", "trainer", {"x": DEEP}),
}


def body_of(form: dict[str, Any], nested: str) -> bytes:
    return json.dumps(form).replace(f'"{DEEP}"', nested).encode()


def nested_of(levels: int, kind: str) -> str:
    opening, ending = KINDS[kind]
    levels //= len(ending)
    return opening * levels + "1" + ending * levels


def post(doors: Any, path: str, key: str, body: bytes) -> Any:
    return doors.ask("POST", path, key, content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", [40, 90, 150, 220, 300, 900])
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_of_any_depth_is_served_or_refused_by_the_fields_name(keyed, name, levels, kind):
    form, field = CHATS[name]
    reply = post(keyed, "/v1/chat/completions", "ann", body_of(form, nested_of(levels, kind)))
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"].startswith(field), error
    else:
        record = keyed.ask("GET", f"/v1/turns/{reply.json()['id']}", "admin")
        assert record.status_code == 200, record.text


@pytest.mark.parametrize("levels", [300, 900])
@pytest.mark.parametrize("name", NOT_READ)
def test_a_field_that_is_not_read_may_have_any_depth(keyed, name, levels):
    reply = post(keyed, "/v1/chat/completions", "ann", body_of(NOT_READ[name], nested_of(levels, "object")))
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("levels", [40, 150, 300])
def test_a_calls_text_of_any_depth_is_served(keyed, levels):
    """OpenAI's wire has the arguments as text, and a history with such a call can go on."""
    for kind in KINDS:
        body = json.dumps({"messages": called(nested_of(levels, kind))}).encode()
        reply = post(keyed, "/v1/chat/completions", "ann", body)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", [40, 150, 220, 300, 900, 5000])
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_body_of_any_depth_is_refused(keyed, name, levels, kind):
    path, key, form = OTHERS[name]
    reply = post(keyed, path, key, body_of(form, nested_of(levels, kind)))
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.json()["error"]["message"]


def test_after_all_that_the_log_is_quiet_and_the_ledger_whole(keyed, tmp_path):
    assert "Traceback" not in keyed.server.log
    backup(keyed.server.data_dir / "ledger.sqlite3", tmp_path / "copy.sqlite3")
    with closing(ledger_open.connect(tmp_path / "copy.sqlite3", read_only=True)) as db:
        assert audit.audit(db, is_deep=True) == []
