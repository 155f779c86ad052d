"""Send requests that nobody expects, by the tens of thousands, to a real server over a stub engine.

    scripts/e2e.sh api_fuzz FOLDER [--requests 50000] [--minutes 30] [--seed 1] [--report FILE]

Right and wrong requests of every operation in the server's OpenAPI document, chats of any content, bytes that are no
JSON, queries, bodies that are nested too deeply. The exit code is 0 if each answer came within a second, none was a 5xx
(but a 503 with Retry-After), each error has OpenAI's form and names its field, the log has no traceback, and the server
is well and its ledger whole at the end. Needs the packages of the extra `dev`.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode

from e2e import api_requests as drawn
from e2e.api_requests import Answer, Asked
from openclaw_rl.ledger import audit
from openclaw_rl.ledger import open as ledger_open
from openclaw_rl.ledger.snapshot import backup
from openclaw_rl.testing.running_server import RunningServer, engine_flags, running_stub

SLOW_S = 1.0
TOLD_OF_ITSELF = ("checkpoints: ", "trainer: ", "log-probs: ", "driver: ")
"""Problems that a trainer reports of itself: the requests are a trainer's too."""
_CHATS_KEY, _TRAINER_TOKEN = "chat-5up3r", "trainer-5up3r"
_KEPT = 20
"""Examples of each fault in the report."""


@dataclass
class Findings:
    """Counts of the answers by operation and status, their faults and times."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)

    def add(self, source: str, answer: Answer) -> None:
        self.sources[source] += 1
        self.statuses[answer.asked.operation, answer.status] += 1
        self.seconds.append(answer.seconds)
        if answer.seconds > SLOW_S:
            self.slow.append(f"{answer.asked.operation}: {answer.status} after {answer.seconds:.2f} s")
        for fault in drawn.faults(answer):
            self.faults[f"{answer.asked.operation}: {fault}"] += 1
            if self.faults[f"{answer.asked.operation}: {fault}"] <= _KEPT:
                sent = answer.asked.content or getattr(answer.asked.case, "body", b"")
                self.examples.append(f"{fault}: {answer.asked.operation} {sent!r:.300} -> {answer.text:.300}")

    def report(self) -> dict[str, Any]:
        times = sorted(self.seconds) or [0.0]
        by_status: Counter[int] = Counter()
        for (_, status), count in self.statuses.items():
            by_status[status] += count
        return {
            "requests": len(self.seconds),
            "operations": len({operation for operation, _ in self.statuses}),
            "by source": dict(self.sources),
            "by status": dict(sorted(by_status.items())),
            "503 of": sorted({operation for operation, status in self.statuses if status == 503}),
            "seconds": {
                name: round(times[min(int(share * len(times)), len(times) - 1)], 4)
                for name, share in (("median", 0.5), ("99 %", 0.99), ("99.9 %", 0.999), ("longest", 1.0))
            },
            f"slower than {SLOW_S:g} s": self.slow,
            "faults": dict(self.faults),
        }


def fuzz(
    url: str,
    keys: Mapping[str, str],
    findings: Findings,
    *,
    requests_wanted: int,
    first_seed: int,
    until: float = math.inf,
    per_round: int = 200,
) -> None:
    """Send requests of all sources in turn until there are enough, or the clock (monotonic) reaches `until`.

    per_round: draws of one source before the next source has its turn, times the source's share.
    """
    document = httpx.get(f"{url}/openapi.json", headers=_bearer(keys["admin"]), timeout=60).json()
    with requests.Session() as session, httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        session.trust_env = False

        def ask(asked: Asked) -> Answer:
            headers = _bearer(keys[drawn.key_of(asked.path)])
            began = time.monotonic()
            if asked.case is not None:
                found = asked.case.call(base_url=url, session=session, headers=headers, timeout=120)
                status, text, told = (
                    found.status_code,
                    found.text,
                    {k.lower(): str(v) for k, v in found.headers.items()},
                )
            else:
                query = {name: str(value) for name, value in asked.query.items()}
                reply = client.request(
                    asked.method,
                    asked.path,
                    content=asked.content,
                    params=query or None,
                    headers=headers | drawn.JSON_HEADERS,
                )
                status, text, told = reply.status_code, reply.text, {k.lower(): v for k, v in reply.headers.items()}
            return Answer(asked, status, told, text, time.monotonic() - began)

        def send(source: str, asked: Asked) -> None:
            findings.add(source, ask(asked))
            for name, variant in drawn.variants(asked):
                findings.add(f"{source}, {name}", ask(variant))

        sources = list(_sources(drawn.without_keys(document)))
        for number in range(first_seed * 10_000, (first_seed + 1) * 10_000):
            for name, strategy, share in sources:
                left = requests_wanted - len(findings.seconds)
                if left <= 0 or time.monotonic() > until:
                    return
                size = min(left, max(1, int(per_round * share)))
                _send(strategy, size, number, partial(send, name))


def _sources(document: Any) -> Iterator[tuple[str, SearchStrategy[Asked], float]]:
    """Yield each source of requests with its share of a round."""
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        for name, strategy in drawn.by_schema(document, mode):
            yield f"{mode.value} by schema", strategy, 1.0 if name.endswith(drawn.CHAT_PATH) else 0.1
    yield "chats", drawn.chats(), 2.0
    yield "bytes", drawn.bytes_of_any_kind(), 0.5
    yield "queries", drawn.queries(), 0.25
    yield "deep", drawn.deep_bodies(), 0.25


def _send(strategy: SearchStrategy[Asked], size: int, number: int, send: Callable[[Asked], None]) -> None:
    """Draw `size` requests and send each."""

    @seed(number)
    @settings(
        max_examples=size,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def answers(asked: Asked) -> None:
        send(asked)

    try:
        answers()
    except Unsatisfiable:
        return  # a path of any text can not be wrong


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def keys_of(server: RunningServer) -> dict[str, str]:
    """Return the keys of the server's routes, by whose they are."""
    admin = (server.data_dir / "keys" / "admin.key").read_text().strip()
    return {"chat": _CHATS_KEY, "admin": admin, "trainer": _TRAINER_TOKEN}


def last_checks(server: RunningServer) -> dict[str, Any]:
    """Return what is out of order at the end; empty parts are well."""
    log = (server.data_dir / "server.log").read_text()
    copy = server.data_dir / "copy.sqlite3"
    backup(server.data_dir / "ledger.sqlite3", copy)
    with closing(ledger_open.connect(copy, read_only=True)) as db:
        broken = [str(found) for found in audit.audit(db, is_deep=True)]
    return {
        "problems": [p for p in server.status()["problems"] if not p.startswith(TOLD_OF_ITSELF)],
        "tracebacks": log.count("Traceback"),
        "ledger": broken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--minutes", type=float, default=30.0, help="stop after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    findings, began = Findings(), time.monotonic()
    with (
        running_stub(folder, "--tokens-per-s", "0", "--mean-tokens", "8", "--context-length", "1024") as engine,
        RunningServer(folder / f"data-{int(time.time())}", server_args(engine)) as server,
    ):
        fuzz(
            server.url,
            keys_of(server),
            findings,
            requests_wanted=options.requests,
            first_seed=options.seed,
            until=began + 60 * options.minutes,
        )
        report = findings.report() | {"at the end": last_checks(server)}
    report |= {"seed": options.seed, "minutes": round((time.monotonic() - began) / 60, 1)}
    print(json.dumps(report, indent=1, ensure_ascii=False))
    if options.report:
        options.report.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for example in findings.examples:
        print(example, file=sys.stderr)
    is_well = not findings.faults and not findings.slow and not any(report["at the end"].values())
    return 0 if is_well and len(findings.seconds) >= options.requests else 1


def server_args(engine: str) -> list[str]:
    chosen = {
        "model.context_length": "1024",
        "server.trainer_token": _TRAINER_TOKEN,
        "server.api_keys": f'[{{key = "{_CHATS_KEY}", user = "ann"}}]',
    }
    return engine_flags(engine, chosen)


if __name__ == "__main__":
    sys.exit(main())
