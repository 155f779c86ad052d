"""Every route of the OpenAPI document, with the requests of schemathesis and hypothesis, on the real server.

Each gets an answer in time, errors in OpenAI's form, and no 5xx, because engine and ledger are healthy. A 503 with
Retry-After is right while one of the two is out of order, and for a push, because the stub engine cannot be paused.

Every run makes the same requests. A campaign: FUZZ_EXAMPLES=400 FUZZ_SEED=1 pytest tests/security/test_fuzz_api.py
Tens of thousands, against a server of its own, with the time of each answer: `scripts/e2e.sh api_fuzz FOLDER`.
"""

import contextlib
import json
import os
import sys
from collections import Counter
from contextlib import closing
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from e2e import api_fuzz
from e2e.api_requests import (
    CHAT,
    HI,
    NUMBERS,
    RATING,
    TEXTS,
    Answer,
    Asked,
    by_schema,
    deep_bodies,
    faults,
    key_of,
    without_keys,
)
from openclaw_rl.ledger import audit
from openclaw_rl.ledger import open as ledger_open
from openclaw_rl.ledger.snapshot import backup

EXAMPLES, SEED = int(os.environ.get("FUZZ_EXAMPLES", "6")), os.environ.get("FUZZ_SEED")
"""Of each operation, right ones and wrong ones each; None: always the same."""
QUICK = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=SEED is None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def check(doors: Any, reply: httpx.Response | Any) -> None:
    headers = {name.lower(): value for name, value in reply.headers.items()}
    operation = str(reply.request.url)
    assert faults(Answer(Asked(operation, "", ""), reply.status_code, headers, reply.text, 0.0)) == [], reply.text
    if reply.status_code >= 500 and not operation.endswith("/v1/trainer/push/begin"):
        problems = doors.ask("GET", "/healthz", "admin").json()["problems"]
        assert any(problem.startswith(("engine: ", "ledger: ")) for problem in problems), (
            operation,
            reply.text,
            problems,
        )


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_operation_answers_whatever_schemathesis_sends(keyed, mode):
    """Bodies and parameters of the document, and other ones."""
    document = without_keys(keyed.ask("GET", "/openapi.json", "admin").json())
    answered: Counter[tuple[str, int]] = Counter()
    for name, strategy in by_schema(document, mode):

        @QUICK
        @given(strategy)
        def answers(asked: Asked) -> None:
            key = key_of(asked.path).replace("chat", "ann")
            headers = {"Authorization": f"Bearer {keyed.keys[key]}"}
            reply = asked.case.call(base_url=keyed.server.url, headers=headers, timeout=120)
            check(keyed, reply)
            answered[name, reply.status_code] += 1  # noqa: B023 (called below)

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


@settings(QUICK, max_examples=40 if SEED is None else EXAMPLES)
@given(deep_bodies())
def test_a_field_that_is_nested_too_deeply_is_named(keyed, asked):
    reply = keyed.ask("POST", asked.path, "ann", content=asked.content)
    check(keyed, reply)
    if "nested" in reply.text:
        field, _, _ = reply.json()["error"]["param"].partition("[")  # `tools[0]`
        assert f'"{field}"' in asked.content.decode()


@settings(QUICK, max_examples=20 if SEED is None else EXAMPLES)
@given(st.fixed_dictionaries({}, optional={name: TEXTS | NUMBERS for name in ("limit", "state", "session_id", "user")}))
def test_queries_of_any_content(keyed, query):
    check(keyed, keyed.ask("GET", "/v1/turns", "admin", params=query))
    check(keyed, keyed.ask("GET", f"/v1/admin/versions/{quote(str(query.get('limit', 0)), safe='')}", "admin"))


def test_a_short_run_of_the_long_fuzz_finds_nothing(keyed):
    findings = api_fuzz.Findings()
    keys = {"chat": keyed.keys["ann"], "admin": keyed.keys["admin"], "trainer": keyed.keys["trainer"]}
    api_fuzz.fuzz(keyed.server.url, keys, findings, requests_wanted=150, first_seed=7, per_round=1)
    assert findings.faults == {}, findings.examples
    assert {name.partition(",")[0] for name in findings.sources} == {
        "positive by schema",
        "negative by schema",
        "chats",
        "bytes",
        "queries",
        "deep",
    }


def test_after_all_that_the_server_is_well_and_its_ledger_whole(keyed, tmp_path):
    problems = keyed.ask("GET", "/healthz", "admin").json()["problems"]
    assert [problem for problem in problems if not problem.startswith(api_fuzz.TOLD_OF_ITSELF)] == []
    assert "Traceback" not in keyed.server.log
    assert keyed.chat("ann").status_code == 200
    backup(keyed.server.data_dir / "ledger.sqlite3", tmp_path / "copy.sqlite3")
    with closing(ledger_open.connect(tmp_path / "copy.sqlite3", read_only=True)) as db:
        assert audit.audit(db, is_deep=True) == []
