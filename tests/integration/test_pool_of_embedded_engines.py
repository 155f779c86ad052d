"""A pool of two embedded engines, the real server in front and the local trainer behind: prefixes and a version."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.learning.served import embedded_engine
from openclaw_rl.settings import ModelSettings
from openclaw_rl.testing.running_server import RunningServer

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

ARGUMENTS = (
    *("--batch-size", "2", "--set", "trainer.nice=0", "--set", "practice.enabled=false"),
    *("--set", "engine.kind=url"),
)
SESSIONS, TURNS = 4, 3


@pytest.fixture(scope="module")
def urls(short_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    model, cache = ModelSettings(path=str(short_model)), tmp_path_factory.mktemp("cache")
    with ExitStack() as stack:
        yield [stack.enter_context(embedded_engine(model, cache, device="cpu", threads=1)) for _ in range(2)]


def served(urls: list[str], folder: Path, model: Path, *, trains: bool) -> RunningServer:
    """Return a server in front of these engines."""
    named = "engine.urls=[" + ", ".join(f"'{url}'" for url in urls) + "]"
    words = [named, f"model.path={model}", f"training.enabled={str(trains).lower()}"]
    return RunningServer(folder / "data", [*ARGUMENTS, *[flag for word in words for flag in ("--set", word)]])


def chat(server: RunningServer, messages: list[Any], session: str, **more: Any) -> Any:
    body = {"model": "policy", "messages": messages, "max_tokens": 8, **more}
    headers = {"X-Session-Id": session}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()


def hit_rate(server: RunningServer, run: str) -> float:
    """Return the part of the prompts' tokens that engines had cached, over sessions that take turns."""
    cached = asked = 0
    said: dict[str, list[Any]] = {
        f"{run}{n}": [{"role": "system", "content": f"{run} {n}. " * 160}] for n in range(SESSIONS)
    }
    for turn in range(TURNS):
        for session, messages in said.items():
            messages.append({"role": "user", "content": f"Tell me of the number {turn}, please."})
            reply = chat(server, messages, session)
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"] or "."})
            cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            asked += reply["usage"]["prompt_tokens"]
    return cached / asked


def test_conversations_find_their_prefix_as_with_one_engine(urls: list[str], short_model: Path, tmp_path: Path) -> None:
    with served(urls[:1], tmp_path / "one", short_model, trains=False) as one:
        alone = hit_rate(one, "alone")
    with served(urls, tmp_path / "two", short_model, trains=False) as two:
        together = hit_rate(two, "together")
        assert [engine["sessions"] for engine in two.status()["engines"]] == [2, 2]
    assert alone > 0.5, "nothing was cached that could be missed"
    assert together >= 0.9 * alone, (together, alone)


def test_a_trained_version_answers_alike_on_each_engine(urls: list[str], short_model: Path, tmp_path: Path) -> None:
    with served(urls, tmp_path, short_model, trains=True) as server:

        def weights() -> list[list[float]]:
            """Return what each engine's weights say to a fixed prompt."""
            found = []
            for n in range(2):  # two new conversations: one on each engine
                before = [engine["calls"] for engine in server.status()["engines"]]
                reply = chat(
                    server,
                    [{"role": "user", "content": "Say a word."}],
                    f"side {len(before)} {n} {before}",
                    temperature=0,
                    ignore_eos=True,
                    logprobs=True,
                    turn_type="side",
                )
                after = [engine["calls"] for engine in server.status()["engines"]]
                assert sum(after) == sum(before) + 1
                found.append([entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]])
            return found

        base = weights()
        assert base[0] == pytest.approx(base[1], rel=1e-3)
        for number, answer in enumerate(("No, that is wrong. Shorter please.", "Thanks, that is perfect!")):
            asked = {"role": "user", "content": f"Tell me of the number {number}."}
            reply = chat(server, [asked], f"taught {number}")["choices"][0]["message"]
            again = [
                asked,
                {"role": "assistant", "content": reply["content"] or "."},
                {"role": "user", "content": answer},
            ]
            chat(server, again, f"taught {number}")
        server.wait_for("a version serves", lambda now: now["serving"] > 0, 300)
        trained = weights()
        assert trained[0] == pytest.approx(trained[1], rel=1e-3)
        assert trained[0] != pytest.approx(base[0], rel=1e-3)
