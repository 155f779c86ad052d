"""Every route of the OpenAPI document, with the requests of schemathesis and hypothesis, on the real server.

Each gets an answer in time, errors in OpenAI's form, and no 5xx, because engine and ledger are healthy. A 503 with
Retry-After is right while one of the two is out of order, and for a push, because the stub engine cannot be paused.

Every run makes the same requests. A campaign: FUZZ_EXAMPLES=400 FUZZ_SEED=1 pytest tests/security/test_fuzz_api.py
"""

import contextlib
import json
import os
import re
import sys
from collections import Counter
from contextlib import closing
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from openclaw_rl.ledger import audit
from openclaw_rl.ledger import open as ledger_open
from openclaw_rl.ledger.snapshot import backup

EXAMPLES, SEED = int(os.environ.get("FUZZ_EXAMPLES", "10")), os.environ.get("FUZZ_SEED")
"""Of each operation, right ones and wrong ones each; None: always the same."""
QUICK = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=SEED is None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


OWN = re.compile(r"(completions|feedback|models)$|/wishes")
"""Paths that a user's own key opens."""


def key_of(path: str) -> str:
    return "trainer" if "/trainer/" in path else "ann" if OWN.search(path) else "admin"


def check(doors: Any, reply: httpx.Response | Any) -> None:
    if reply.status_code >= 500:
        assert reply.status_code == 503, reply.text
        assert "retry-after" in reply.headers
        if not str(reply.request.url).endswith("/v1/trainer/push/begin"):
            problems = doors.ask("GET", "/healthz", "admin").json()["problems"]
            assert any(problem.startswith(("engine: ", "ledger: ")) for problem in problems), (reply.text, problems)
    if reply.status_code >= 400:
        error = json.loads(reply.text)["error"]
        assert {"message", "type", "code"} <= error.keys()
        assert isinstance(error["message"], str)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_operation_answers_whatever_schemathesis_sends(keyed, mode):
    """Bodies and parameters of the document, and other ones."""
    document = without_keys(keyed.ask("GET", "/openapi.json", "admin").json())
    answered: Counter[tuple[str, int]] = Counter()
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        name = f"{operation.method.upper()} {operation.path}"
        headers = {"Authorization": f"Bearer {keyed.keys[key_of(operation.path)]}"}
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
            continue  # it takes nothing that could be wrong

        @QUICK
        @given(operation.as_strategy(generation_mode=mode))
        def answers(case: Any) -> None:
            waits = case.path == "/v1/trainer/lease" and isinstance(case.body, dict)
            if waits and isinstance(case.body.get("wait_s", 30), int | float):
                case.body["wait_s"] = 0  # it would wait, as it should
            reply = case.call(base_url=keyed.server.url, headers=headers, timeout=120)  # noqa: B023 (called below)
            check(keyed, reply)
            answered[name, reply.status_code] += 1  # noqa: B023

        with contextlib.suppress(Unsatisfiable):  # a path of any text can not be wrong
            (answers if SEED is None else seed(int(SEED))(answers))()
    asked = {name for name, _ in answered}
    assert asked >= {
        "POST /v1/chat/completions",
        "POST /v1/feedback",
        "POST /v1/wishes/{wish_id}",
        "POST /v1/trainer/commit",
        "GET /v1/turns",
    }
    assert len(asked) >= 20
    assert not [name for name, status in answered if status == 401], "they were sent without their key"
    if SEED is not None:
        counts = {status: sum(n for (_, s), n in answered.items() if s == status) for _, status in sorted(answered)}
        busy = sorted({name for name, status in answered if status == 503})
        sys.stderr.write(
            f"\n{mode.value}, seed {SEED}: {len(asked)} operations, answers by status {counts}; 503 {busy}\n"
        )


def without_keys(document: Any) -> Any:
    """Most wrong requests would otherwise be requests without a key."""
    document["components"].pop("securitySchemes", None)
    document.pop("security", None)
    for methods in document["paths"].values():
        for operation in methods.values():
            operation.pop("security", None)
    return document


NUMBERS = st.sampled_from([0, 1, -1, 2, 20, 2**31, 2**53, 2**63, 2**64, 10**30, -(2**63) - 1, 0.5, 1e308, -0.0, 1e-300])
TEXTS = st.sampled_from(
    ["", "a", "\0", "\n", "<|im_end|>", "</think>", "𝔘\U0001f600", "\u202e", "x" * 3000, "{{ 1/0 }}", "%s%n"]
) | st.text(max_size=10)
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": TEXTS}, optional={"arguments": TEXTS | st.just('{"a": 1}') | ANY})},
    optional={"id": ANY, "type": ANY, "index": ANY},
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]),
        "content": TEXTS | st.just([{"type": "text", "text": "a"}]) | ANY,
    },
    optional={
        "tool_calls": st.lists(CALL, max_size=2) | st.none(),
        "tool_call_id": TEXTS,
        "name": TEXTS,
        "reasoning_content": TEXTS,
        "extra": ANY,
    },
)
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=3)},
    optional={
        **{
            name: NUMBERS
            for name in (
                "max_tokens",
                "max_completion_tokens",
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "seed",
                "top_logprobs",
                "frequency_penalty",
                "repetition_penalty",
                "n",
            )
        },
        **{name: st.booleans() for name in ("stream", "logprobs", "ignore_eos", "session_done", "enable_thinking")},
        **{
            name: TEXTS | NUMBERS
            for name in ("session_id", "prompt_cache_key", "model", "task", "episode", "turn_type", "user")
        },
        "step": NUMBERS,
        "stop": TEXTS | st.lists(TEXTS, max_size=3),
        "tools": st.lists(
            st.fixed_dictionaries(
                {"function": st.fixed_dictionaries({"name": TEXTS}, optional={"parameters": ANY, "description": ANY})},
                optional={"type": ANY},
            ),
            max_size=2,
        ),
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | ANY,
        "response_format": ANY | st.just({"type": "json_schema"}),
        "chat_template_kwargs": st.dictionaries(TEXTS | st.just("enable_thinking"), ANY, max_size=2),
        "logit_bias": st.dictionaries(st.sampled_from(["1", "-1", "a", "9999999999"]), NUMBERS, max_size=2),
        "reasoning_effort": ANY,
        "stream_options": st.none() | st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
        "metadata": ANY,
    },
)


HI = {"messages": [{"role": "user", "content": "hi"}]}


RATING = st.fixed_dictionaries(
    {}, optional={"value": st.booleans() | NUMBERS, "comment": TEXTS, "demonstration": TEXTS, "feedback_id": TEXTS}
)


@settings(QUICK, max_examples=80 if SEED is None else 5 * EXAMPLES)
@given(CHAT, RATING, st.integers(0, 9))
@example(HI | {"step": 2**63}, {}, 1)  # beyond what a column of the ledger takes
@example(HI | {"seed": 2**63, "task": 2**64, "max_tokens": 2**70}, {}, 1)
@example(HI | {"chat_template_kwargs": {"chat_template": "{{ 1/0 }}"}}, {}, 1)
@example({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]}, {}, 1)
@example(HI, {"demonstration": "<|im_end|>", "value": 1e-300}, 0)
def test_chats_of_the_right_form_and_any_content(keyed, body, rating, chance):
    """The replies are rated and read, and one in ten is forgotten."""
    reply = keyed.ask("POST", "/v1/chat/completions", "ann", content=json.dumps(body).encode())
    check(keyed, reply)
    if reply.status_code == 200 and not body.get("stream"):
        turn = reply.json()
        assert turn["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
        record = keyed.ask("GET", f"/v1/turns/{turn['id']}", "admin")
        assert record.status_code in (200, 404), record.text  # 404: a background request
        said = json.dumps({"turn_id": turn["id"], **rating}).encode()
        check(keyed, keyed.ask("POST", "/v1/feedback", "ann", content=said))
        if not chance:
            forget = {"turn_id": turn["id"], "rebuild": True}
            forgotten = keyed.ask("POST", "/v1/admin/forget", "admin", json=forget)
            assert forgotten.status_code == (200 if record.status_code == 200 else 409), forgotten.text
            assert keyed.ask("GET", f"/v1/turns/{turn['id']}", "admin").status_code == 404


@settings(QUICK, max_examples=5 if SEED is None else EXAMPLES)
@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b'{"a":' * 5000)
@example(b'{"messages":' + b"9" * 5000 + b"}")
@example(b"\xef\xbb\xbf{}")
@example(b'"\\ud800"')
@example(b"nul")
def test_bodies_that_are_no_json(keyed, body):
    for path, key in (
        ("/v1/chat/completions", "ann"),
        ("/v1/feedback", "ann"),
        ("/v1/admin/pin", "admin"),
        ("/v1/trainer/commit", "trainer"),
    ):
        reply = keyed.ask("POST", path, key, content=body, headers={"Content-Type": "application/json"})
        assert 400 <= reply.status_code < 500, reply.text
        check(keyed, reply)


@settings(QUICK, max_examples=20 if SEED is None else EXAMPLES)
@given(st.fixed_dictionaries({}, optional={name: TEXTS | NUMBERS for name in ("limit", "state", "session_id", "user")}))
def test_queries_of_any_content(keyed, query):
    check(keyed, keyed.ask("GET", "/v1/turns", "admin", params=query))
    check(keyed, keyed.ask("GET", f"/v1/admin/versions/{quote(str(query.get('limit', 0)), safe='')}", "admin"))


def test_after_all_that_the_server_is_well_and_its_ledger_whole(keyed, tmp_path):
    problems = keyed.ask("GET", "/healthz", "admin").json()["problems"]
    told = ("checkpoints: ", "trainer: ")  # what a trainer says of itself
    assert [problem for problem in problems if not problem.startswith(told)] == []
    assert "Traceback" not in keyed.server.log
    assert keyed.chat("ann").status_code == 200
    backup(keyed.server.data_dir / "ledger.sqlite3", tmp_path / "copy.sqlite3")
    with closing(ledger_open.connect(tmp_path / "copy.sqlite3", read_only=True)) as db:
        assert audit.audit(db, is_deep=True) == []
