"""The experiment of personalization: simulated people correct a running server a few times, then ask it new questions.

It speaks the public API alone. Corrections are main turns, as a chat client sends them: a question, and after a reply
that fails, a complaint as the next message. Then the chats rest, so that the server trains and practises. Held-out
questions are side turns, which train nothing. Their first replies are scored before and after:

    base      the version that served at the start
    memory    the same version with the wish in the system prompt, as agents' memories have it
    learned   the version after the corrections and the rest, without the wish in any prompt

A person is simulated by rules (`personas`), or by a model behind an OpenAI-compatible URL that has the paper's student
or teacher in its prompt (arXiv:2603.10165). The same model then scores the replies.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from openclaw_rl.offline import personas
from openclaw_rl.offline.personas import ExperimentError, Person, Problem

ARMS = ("base", "memory", "learned")
STREAK = 3
"""First replies in a row that meet the wish: then it counts as learned."""
MEMORY = "Remember about the user:\n- {}"
_POLL_S = 2.0
_RESTS_S = 20.0
"""Time without a new version, while each wish rests, after which practice counts as over."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one experiment."""

    corrections: int = 4
    held_out: int = 24
    most_turns: int = 40
    """Questions after which no more corrections are looked for."""
    max_tokens: int = 96
    temperature: float = 0.7
    idle_s: float = 600.0
    """Longest rest after the corrections."""
    problem_tokens: int = 256
    """Longest reply to a word problem."""


@dataclass(frozen=True, slots=True)
class Said:
    """First reply to one question."""

    question: str
    reply: str
    version: int
    score: float


@dataclass(slots=True)
class Result:
    """One experiment, as it is written to its JSON file."""

    person: str
    seed: int
    method: str
    plan: dict[str, Any]
    base: list[Said] = field(default_factory=list)
    memory: list[Said] = field(default_factory=list)
    learned: list[Said] = field(default_factory=list)
    right: dict[str, float] = field(default_factory=dict)
    """Share of word problems that are answered right, by arm: the first measure of what a wish costs elsewhere."""
    corrections: int = 0
    turns: int = 0
    """Main turns of the person."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Time line: `at` in seconds since the start."""

    def scores(self, arm: str) -> list[float]:
        return [said.score for said in getattr(self, arm)]

    @property
    def turns_until_learned(self) -> int | None:
        """Return the corrections, and the held-out chats before the first streak of good first replies."""
        passed = [score >= 0.75 for score in self.scores("learned")]
        for start in range(len(passed) - STREAK + 1):
            if all(passed[start : start + STREAK]):
                return self.corrections + start
        return None


class Chat:
    """The server's public API, as a chat client uses it."""

    def __init__(self, client: httpx.Client, plan: Plan, seed: int) -> None:
        self._client, self._plan, self._seed, self._calls = client, plan, seed, 0

    def say(
        self, messages: Sequence[Mapping[str, str]], *, session: str | None, max_tokens: int | None = None
    ) -> tuple[str, bool, int]:
        """Return the reply, whether it ended by itself, and its version. session: None for a side turn."""
        self._calls += 1
        headers = {"X-Turn-Type": "side"} if session is None else {"X-Session-Id": session}
        body = {
            "model": "policy",
            "messages": list(messages),
            "max_tokens": max_tokens or self._plan.max_tokens,
            "temperature": self._plan.temperature,
            "seed": 1000 * self._seed + self._calls,
        }
        answer = self._sent("POST", "/v1/chat/completions", headers=headers, json=body)
        try:
            choice, version = answer.json()["choices"][0], int(answer.headers["X-Weight-Version"])
            return str(choice["message"]["content"] or ""), choice["finish_reason"] == "stop", version
        except (KeyError, IndexError, ValueError) as error:
            raise ExperimentError(f"the server's answer is no chat completion of ours: {error!r}") from error

    def wishes(self) -> list[dict[str, Any]]:
        """Return the wishes of this key's user."""
        found: list[dict[str, Any]] = self._sent("GET", "/v1/wishes").json()["wishes"]
        return found

    def _sent(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        for pause in (1.0, 5.0, 20.0, None):
            try:
                answer = self._client.request(method, path, **kwargs)
            except httpx.HTTPError as error:
                raise ExperimentError(f"the server does not answer: {error!r}") from error
            if answer.status_code not in (429, 503) or pause is None:
                break
            time.sleep(pause)
        if answer.is_error:
            raise ExperimentError(f"{path}: {answer.status_code} {answer.text[:300]}")
        return answer


def run(
    chat: Chat,
    person: Person,
    plan: Plan,
    seed: int,
    method: str,
    tell: Callable[[str], None],
    problems: Sequence[Problem] = (),
) -> Result:
    """Carry out one experiment. The server should be a fresh one: its present version is the base.

    problems: word problems that are asked before and after.
    """
    started = time.monotonic()
    result = Result(person.name, seed, method, asdict(plan))
    dice = random.Random(seed)
    held_out, train = (dice.sample(own := person.questions(part), len(own)) for part in ("held_out", "train"))
    held_out = held_out[: plan.held_out]

    def event(name: str, **fields: Any) -> None:
        result.events.append({"at": round(time.monotonic() - started, 1), "event": name, **fields})
        tell(f"{result.events[-1]['at']:7.1f} s  {name}  " + ", ".join(f"{k} {v}" for k, v in fields.items()))

    result.base = _first_replies(chat, person, held_out, None)
    event("base", score=_mean(result.scores("base")))
    if problems:
        result.right["base"] = _share_right(chat, problems, plan)
        event("problems", right=result.right["base"])
    result.memory = _first_replies(chat, person, held_out, MEMORY.format(person.wish))
    event("memory", score=_mean(result.scores("memory")))
    for number, question in enumerate(train[: plan.most_turns]):
        if result.corrections == plan.corrections:
            break
        is_corrected = _converse(chat, person, question, f"experiment-{seed}-{number}", result)
        result.corrections += is_corrected
        event("chat", corrected=is_corrected, turns=result.turns)
    _rest(chat, plan, held_out[0], event)
    result.learned = _first_replies(chat, person, held_out, None)
    event("learned", score=_mean(result.scores("learned")), version=result.learned[-1].version)
    if problems:
        result.right["learned"] = _share_right(chat, problems, plan)
        event("problems", right=result.right["learned"])
    return result


def _first_replies(chat: Chat, person: Person, questions: Sequence[str], system: str | None) -> list[Said]:
    found = []
    for question in questions:
        messages = [] if system is None else [{"role": "system", "content": system}]
        reply, has_ended, version = chat.say([*messages, {"role": "user", "content": question}], session=None)
        found.append(Said(question, reply, version, person.score(question, reply, has_ended=has_ended)))
    return found


def _share_right(chat: Chat, problems: Sequence[Problem], plan: Plan) -> float:
    replies = [
        chat.say([{"role": "user", "content": one.question}], session=None, max_tokens=plan.problem_tokens)[0]
        for one in problems
    ]
    return _mean([float(one.is_right(reply)) for one, reply in zip(problems, replies, strict=True)])


def _converse(chat: Chat, person: Person, question: str, session: str, result: Result) -> bool:
    """Hold one chat; return True if the person complained. The message after a reply is what the server learns from."""
    messages = [{"role": "user", "content": question}]
    reply, has_ended, _ = chat.say(messages, session=session)
    result.turns += 1
    complaint = person.answer(question, reply, has_ended=has_ended, said=())
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": complaint or personas.THANKS[0]}]
    chat.say(messages, session=session)
    result.turns += 1
    return complaint is not None


def _rest(chat: Chat, plan: Plan, question: str, event: Callable[..., None]) -> None:
    """Wait until every wish rests and no new version comes, or until the time is over."""
    end, version, changed = time.monotonic() + plan.idle_s, -1, time.monotonic()
    while time.monotonic() < end:
        wishes = chat.wishes()
        newest = max((int(wish.get("measured_in") or 0) for wish in wishes), default=0)
        if newest != version:
            version, changed = newest, time.monotonic()
            shares = [f"{100 * wish['learned']:.0f} %" for wish in wishes if wish.get("learned") is not None]
            event("version", number=newest, wishes=len(wishes), learned=" ".join(shares) or "–")
        why = {str(wish.get("rests") or wish.get("reason")) for wish in wishes if not _is_open(wish)}
        if wishes and not any(map(_is_open, wishes)) and time.monotonic() - changed > _RESTS_S:
            event("rests", why="; ".join(sorted(why)))
            return
        time.sleep(_POLL_S)
    event("time is over", after=plan.idle_s)


def _is_open(wish: Mapping[str, Any]) -> bool:
    """Return True while the wish needs practice of its own."""
    return wish.get("state") == "active" and wish.get("rests") is None


def report(results: Sequence[Result]) -> str:
    """Return a table of results: the mean over seeds of each arm's score, with a 95 % interval over replies.

    `right`: the share of word problems that are answered right, before and after.
    """
    lines = [
        "# Personalization",
        "",
        "| person | method | seeds | corrections | base | memory | learned | turns until learned | right | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.person, result.method), []).append(result)
    for (person, method), some in sorted(groups.items()):
        cells = [person, method, str(len(some)), f"{statistics.fmean(one.corrections for one in some):g}"]
        cells += [interval([score for one in some for score in one.scores(arm)]) for arm in ARMS]
        turns = [one.turns_until_learned for one in some]
        known = [str(value) if value is not None else "never" for value in turns]
        both = [_mean([one.right[arm] for one in some if arm in one.right]) for arm in ("base", "learned")]
        is_asked = any(one.right for one in some)
        cells += [", ".join(known), f"{both[0]:.2f}, {both[1]:.2f}" if is_asked else "–"]
        cells.append(", ".join(f"{one.events[-1]['at']:.0f}" for one in some if one.events))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Replies", ""]
    for one in results:
        for arm in ARMS:
            for said in getattr(one, arm)[:2]:
                text = " ".join(said.reply.split())[:240]
                lines.append(
                    f"- {one.person}, seed {one.seed}, {arm}, version {said.version}: *{said.question}* {text}"
                )
    return "\n".join(lines) + "\n"


def interval(scores: Sequence[float]) -> str:
    """Return the mean, with Wilson's 95 % interval, which holds for shares near 0 and 1 too."""
    if not scores:
        return "–"
    n, p, z = len(scores), statistics.fmean(scores), 1.96
    middle, spread = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    low, high = (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)
    return f"{p:.2f} ({max(0.0, low):.2f}–{min(1.0, high):.2f})"


def draw(results: Sequence[Result], file: Path) -> bool:
    """Write bars of each arm's score as SVG; return False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    groups = list(dict.fromkeys((one.person, one.method) for one in results))
    figure = Figure((2.2 + 1.6 * len(groups), 3.4), layout="constrained")
    panel = figure.subplots()
    for number, arm in enumerate(ARMS):
        by_group = [[statistics.fmean(o.scores(arm)) for o in results if (o.person, o.method) == g] for g in groups]
        places = [place + 0.25 * (number - 1) for place in range(len(groups))]
        panel.bar(places, [statistics.fmean(scores) for scores in by_group], 0.22, label=arm)
        for place, scores in zip(places, by_group, strict=True):
            panel.plot([place] * len(scores), scores, ".", color="black", markersize=4)
    panel.set_xticks(range(len(groups)), [f"{person}\n{method}" for person, method in groups])
    panel.set_ylabel("share of new first replies\nthat meet the wish")
    panel.set_ylim(0, 1)
    figure.legend(loc="outside upper center", ncols=len(ARMS), fontsize="small")
    figure.savefig(file, metadata={"Date": None})
    return True


def load(files: Sequence[Path]) -> list[Result]:
    """Read results. Raises ExperimentError for a file that is none."""
    found = []
    for file in files:
        try:
            rows = json.loads(file.read_text())
            for row in rows:
                said: dict[str, Any] = {arm: [Said(**one) for one in row.pop(arm)] for arm in ARMS}
                found.append(Result(**row, **said))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ExperimentError(f"{file} holds no results of an experiment: {error}") from error
    return found


def _mean(scores: Sequence[float]) -> float:
    return round(statistics.fmean(scores), 3) if scores else 0.0
