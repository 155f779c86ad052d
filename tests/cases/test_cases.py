"""Every public case of `tests/data/open_cases.jsonl`, by its id. `README.md` lists the test of each case."""

import asyncio
import importlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness.cases import CASES
from harness.checks import failures
from harness.evidence import evidence
from harness.host import Host, Server, stub_settings
from harness.listen import served
from harness.model import CONTEXT, Vocabulary
from harness.play import play
from harness.stubs import Stubs

from openclaw_opd.hint_judge import parse_hint
from openclaw_rl.judge.judge import parse_vote

HERE = Path(__file__).parent
PARSED = ("JV-1", "JV-2", "JV-6", "HX-1")
"""Texts for the parsers of verdicts and hints. They need no server."""
ELSEWHERE: dict[str, dict[str, str]] = tomllib.loads((HERE / "clauses.toml").read_text())
"""Cases that need a trainer, a swap, a kill or a failing start: the test of the case, and the tests of its clauses.
(Half of CL-2, an engine with another template, cannot happen: the engine gets ids, and never uses its template.)"""
PLAYED = [case for case in CASES if case not in (*PARSED, *ELSEWHERE)]
PACE = {"ST-1": 0.1, "CO-2": 0.2}
"""Length of a second of the case, keep-alives included, so that no test takes 45 s."""
COUNTED: dict[tuple[str, str], dict[str, Any]] = {
    # 40 s without text, and 15 s of silence at most: it was heard of at the beginning, and twice since.
    ("ST-1", "sse[0].first_byte_s"): {"at": "sse[0].signs_before_text", "op": "ge", "value": 1},
    ("ST-1", "sse[0].max_gap_s"): {"at": "sse[0].signs_before_text", "op": "ge", "value": 3},
    # 2 s of an engine that says something every 0.2 s.
    ("ST-6", "engine.calls[*].aborted_within_s"): {"at": "engine.calls[*].made_after_leaving", "op": "le", "value": 10},
    ("JV-3", "resp[1].elapsed_s"): {"at": "turn[1].said_at.served", "op": "before", "value": "turn[0].said_at.dropped"},
    ("CO-2", "health.max_latency_s"): {"at": "beside_the_largest.health_answers", "op": "ge", "value": 25},
    ("CO-2", "sse[*].max_gap_s"): {"at": "beside_the_largest.silence", "op": "le", "value": 0.5},
}
"""Bounds of a time, as counts, orders and shares: on a busy machine every part is late, so a stopwatch cannot find a
server that waits. (The 60 s of WS-1 are the timeout of its clients.)"""
SETTINGS: dict[str, dict[str, Any]] = {
    "ST-1": {"server.keepalive_s": 1.0},
    "JV-3": {"judge.votes": 3, "judge.quorum": 2, "judge.timeout_s": 3.0},
    "HX-2": {"method.name": "opd", "method.hint_source": "judge", "method.hint_votes": 1},
    "TN-1": {"method.name": "opd", "method.hint_source": "judge", "method.hint_votes": 1},
    "AS-1": {"server.api_keys": [{"key": "s3cr3t-key", "user": "tester"}]},
}


async def settled(server: Server) -> None:
    """Wait until all paired turns are judged and scored."""
    async with asyncio.timeout(120):
        while True:
            counts = (await asyncio.to_thread(server.admin, "/v1/admin/status"))["counts"]
            if not any(counts.get(state) for state in ("paired", "judged", "running")):
                return
            await asyncio.sleep(0.02)


SAID = {
    "four turns recorded under two derived sessions": lambda found: (
        len(found["turns"]) == 4 and len(found["samples"]) == 2
    ),
    "a warning plus a metric that counts four skipped turns": lambda found: False,
    "error names image_url": lambda found: "image_url" in found["turn_or_error"][0]["error"]["message"],
    "prompt has placeholder and trainable is false": lambda found: False,
}


def checks_of(case: Mapping[str, Any], found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the case's checks, without a stopwatch, and with the differences of our own interface."""
    checks = []
    for check in case["expect"]["checks"]:
        check = COUNTED.get((case["id"], check["at"]), check)
        if check["op"] == "le_expr":
            assert check["value"] == "context_length - prompt_tokens"
            check = check | {"op": "le", "value": CONTEXT - found["engine"]["calls"][0]["prompt_tokens"]}
        if case["id"] == "AS-1" and check["at"] == "resp[*].status":
            # `/v1/models` tells a name and a length, and answers without a key: OpenClaw asks so.
            routes = [request["path"] for request in case["requests"]]
            others = [i for i, path in enumerate(routes) if path != "/v1/models"]
            checks += [check | {"at": f"resp[{i}].status", "op": "in"} for i in others]
            continue
        checks.append(check)
    return checks


@pytest.mark.parametrize("case_id", PLAYED)
async def test_case(case_id: str, host: Host, model_folder: Path, tmp_path: Path) -> None:
    case, folder = CASES[case_id], tmp_path / "server"
    vocabulary = Vocabulary.of(model_folder)
    stubs = Stubs(case, vocabulary, pace=PACE.get(case_id, 1.0))
    async with served(stubs) as url:
        settings = {
            **stub_settings(url),
            "judge.retries": 0,
            "judge.timeout_s": 120.0,
        }
        async with host.server(folder, settings | SETTINGS.get(case_id, {})) as server:
            seen = await play(server.url, case["requests"])
            await settled(server)
            async with asyncio.timeout(120):
                while stubs.running:
                    await asyncio.sleep(0.01)
            found = await asyncio.to_thread(evidence, server, seen, stubs, vocabulary)
        if case_id == "AS-1":
            without = {key: value for key, value in settings.items() if key != "server.api_keys"}
            async with host.server(folder / "open", without) as server:
                found["proc_without_key"] = {"bind": server.url.split("/")[2].rpartition(":")[0]}
    assert failures(checks_of(case, found), found, said=SAID) == []


@pytest.mark.parametrize("case_id", PARSED)
def test_case_of_a_parser(case_id: str) -> None:
    case = CASES[case_id]
    texts = case.get("judge_texts") or [case["judge_text"]]
    scores = [parse_vote(text) for text in texts]
    found = {"judge": {"score": scores[0], "scores": scores, "hints": [parse_hint(text).hint for text in texts]}}
    assert failures(case["expect"]["checks"], found, said={}) == []


@pytest.mark.parametrize("case_id", ELSEWHERE)
def test_case_that_runs_elsewhere_is_where_the_table_says(case_id: str) -> None:
    for where in ELSEWHERE[case_id].values():
        path, _, name = where.partition("::")
        assert f"def {name}(" in (HERE.parent.parent / path).read_text(), where


def test_every_case_has_a_test_and_the_table_names_it() -> None:
    assert len(CASES) == 46 == len({*PLAYED, *PARSED, *ELSEWHERE})
    assert (HERE / "README.md").read_text() == importlib.import_module("harness.table").table(CASES, PARSED, ELSEWHERE)
