"""The fuzz of the API tells faults from right answers. A short run of it is in `tests/security/test_fuzz_api.py`."""

import json

import pytest

from e2e import api_fuzz
from e2e.api_requests import Answer, Asked, faults, variants
from openclaw_rl.web.bodies import error

ASKED = Asked("POST /v1/chat/completions", "POST", "/v1/chat/completions", b"{}")


@pytest.mark.parametrize(
    ("status", "text", "headers", "is_fault"),
    [
        (200, "", {}, False),
        (400, error("n: 1", status=400, code="invalid_request_error", param="n").decode(), {}, False),
        (400, error("n: 1", status=400, code="invalid_request_error").decode(), {}, True),
        (400, error("no JSON", status=400, code="invalid_json").decode(), {}, False),
        (404, error("no such turn", status=404, code="turn_not_found").decode(), {}, False),
        (404, '{"detail": "Not Found"}', {}, True),
        (409, '{"error": {"message": "no", "type": "x", "code": "refused"}}', {}, True),
        (409, '{"error": {"message": ["no"], "type": "x", "code": "refused", "param": null}}', {}, True),
        (422, "<html>", {}, True),
        (500, error("oh", status=500, code=None).decode(), {}, True),
        (503, error("later", status=503, code="overloaded").decode(), {}, True),
        (503, error("later", status=503, code="overloaded").decode(), {"retry-after": "2"}, False),
    ],
)
def test_a_fault_is_a_5xx_another_form_or_a_field_without_a_name(
    status: int, text: str, headers: dict[str, str], is_fault: bool
) -> None:
    assert bool(faults(Answer(ASKED, status, headers, text, 0.0))) == is_fault


def test_slow_answers_and_faults_are_in_the_report() -> None:
    findings = api_fuzz.Findings()
    findings.add("chats", Answer(ASKED, 200, {}, "", 0.1))
    findings.add("chats", Answer(ASKED, 500, {}, "", api_fuzz.SLOW_S + 1))
    report = findings.report()
    assert (report["requests"], report["by status"]) == (2, {200: 1, 500: 1})
    assert len(report["slower than 1 s"]) == len(report["faults"]) == len(findings.examples) == 1


def test_a_chat_has_variants_and_other_requests_have_none() -> None:
    asked = Asked(ASKED.operation, "POST", ASKED.path, b'{"messages": [], "stream": true}')
    found = {name: variant.content or b"" for name, variant in variants(asked)}
    assert json.loads(found["streamed or not"])["stream"] is False
    assert json.loads(found["as lists"]) == {"messages": [[]], "stream": [True]}
    assert found["cut"]
    assert list(variants(Asked("POST /v1/feedback", "POST", "/v1/feedback", b"{}"))) == []
    assert list(variants(Asked(ASKED.operation, "POST", ASKED.path, b"no JSON"))) == []
