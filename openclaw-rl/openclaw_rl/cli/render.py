"""The server's answers as text for a terminal: its status, a list of turns, one turn.

Values that clients sent (session ids, messages) are shown without control characters: they must not move a terminal's
cursor.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from openclaw_rl.messages import Message
from openclaw_rl.types.pictures import words_of

_Body = Mapping[str, Any]
"""JSON of the server, which `/openapi.json` describes."""

_WAITS = {
    "served": "for the next message",
    "paired": "for the judge",
    "judged": "for the method to score them",
    "sampled": "for a full batch",
    "leased": "for the end of the training step",
}
_NO_SESSION = (
    "  no later request was seen to continue it. The client names no session, so its chats are recognised by what\n"
    "  they repeat; the header X-Session-Id (one value a chat) helps a client that changes or cuts its history"
)
_HEAD: tuple[str, ...] = ("reply", "finished", "version", "tokens", "verdict", "state", "user", "session")
_LONGEST_TEXT = 400
"""Characters of a message that one turn's page shows."""


def status(body: _Body, url: str) -> str:
    """Return the text of `status`: the version that serves, the turns by state, the training, the faults."""
    counts = body["counts"]
    up = _span(time.time() - body["started_at"])
    lines = [f"{body['model']} at {url}/v1, method {body['method']}, up {up}"]
    if body["policies"] > 1:
        lines.append(f"policy {plain(body['policy'])}, of {body['policies']} (openclaw-rl policies)")
    lines += [_serving(body), _learning(body)]
    if body.get("practice") is not None:
        lines.append(str(body["practice"]["line"]))
    lines += [_engine(number, engine) for number, engine in enumerate(body.get("engines", ()), 1)]
    lines += [f"  ! {problem}" for problem in body["problems"]]
    lines += ["", "turns, by state"]
    lines += [f"  {state:9}{counts[state]:>8}  wait {what}" for state, what in _WAITS.items()]
    lines += [
        _line("trained", counts, "in one version each"),
        _line("dropped", counts, _parts("dropped", counts)),
    ]
    if counts.get("practice"):
        lines.append(_line("practice", counts, f"replies that nobody asked for: {_parts('practice', counts)}"))
    lines += ["", "requests"]
    lines += [
        _line("all", {"all": counts["requests"]}, f"{counts['running']} running"),
        _line("failed", {"failed": counts["abandoned"]}, _parts("abandoned", counts)),
        _line(
            "side", counts, _parts("side", counts) or "requests of the client itself (titles, heartbeats): not recorded"
        ),
        _line("feedback", counts, _parts("feedback", counts)),
    ]
    lines += ["", "versions, newest last"]
    lines += [_version(row) for row in body["versions"]]
    return "\n".join(line.rstrip() for line in lines)


def _engine(number: int, engine: _Body) -> str:
    """Return the line of one engine of a pool."""
    state = "is drained" if engine["is_drained"] else "serves" if engine["is_in"] else "is out of the pool"
    load = f"{engine['running']} running, {engine['sessions']} sessions, {engine['failures']} failed calls"
    return f"engine {number} at {engine['engine']} {state}: {load}"


def engines(rows: Sequence[_Body]) -> Iterator[str]:
    """Yield a line for each engine of a pool, and one for each that is out of order."""
    for number, engine in enumerate(rows, 1):
        yield _engine(number, engine)
        if engine["fault"] is not None:
            yield f"  ! engine {number}: {engine['fault']}"


def turns(rows: Sequence[_Body]) -> Iterator[str]:
    """Yield a head, and a line for each turn."""
    table = [_HEAD, *map(_turn, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def turn(record: _Body) -> str:
    """Return the text of one turn: its messages, and why it was or was not trained on."""
    request, reply, verdict, sample = record["request"], record["turn"], record["verdict"], record["sample"]
    scope = request["scope"]
    session = "no session id" if scope["session_id"] is None else f"session {plain(scope['session_id'])}"
    versions = ", ".join(str(run["weight_version"]) for run in reply["versions"]) or "-"
    lines = [
        reply["turn_id"],
        f"  user {plain(scope['user'])}, {session}, version {versions}, {len(request['prompt_ids'])} tokens of prompt,"
        f" {len(reply['response_ids'])} of reply ({reply['finish_reason']})",
        "",
        *(_said("asked", message) for message in request["messages"][-1:]),
        _said("replied", reply["reply"]),
    ]
    if record["next_state"] is not None:
        lines += [_said("then", message) for message in record["next_state"]["messages"]]
        lines += [f"  {'reaction':9}{plain(reaction)}" for reaction in record["next_state"]["reactions"]]
    lines += [f"  {'feedback':9}{_feedback(said)}" for said in record["feedback"]]
    if verdict is not None:
        why = f": {_short(verdict['rationale'])}" if verdict["rationale"] else ""
        lines += [f"  {'verdict':9}{verdict['value']:+d} ({verdict['source']}{why})"]
    if sample is not None and sample["reward"] is not None:
        lines += [f"  {'reward':9}{sample['reward']:+g}"]
    if record.get("practice"):
        lines += [f"  {'practice':9}{_practice(record)}: no user asked for this reply"]
    lines += ["", f"it is {_state(record)}"]
    if scope["session_id"] is None and (record["state"] == "served" or record["reason"] == "no_next_state"):
        lines += [_NO_SESSION]
    lines += [
        f"  {when(event['at'])}  {event['state']:8}  {plain(event['detail'])}".rstrip() for event in record["events"]
    ]
    return "\n".join(lines)


def wishes(rows: Sequence[_Body]) -> Iterator[str]:
    """Yield two lines for each wish: its state in figures, and its words."""
    for row in rows:
        figures = [str(row["state"])]
        if row["state"] == "active":
            figures = [f"rests: {plain(row['rests'])}" if row["rests"] else "practised"]
        if row["reason"]:
            figures.append(plain(row["reason"]))
        if row["learned"] is not None:
            figures.append(f"learned {100 * row['learned']:.0f} %")
        if row["kl"] is not None:
            figures.append(f"KL {row['kl']:.2f}")
        figures.append(f"{row['practised']} practice replies in {row['updates']} updates")
        if row["since"] is not None:
            figures.append(f"since version {row['since']}")
        scope = "everywhere" if row["is_general"] else "where it was asked"
        yield f"{row['wish_id']:>4}  {_short(row['text'])}"
        asked = f"{len(row['sources'])} {'time' if len(row['sources']) == 1 else 'times'}"
        yield f"      {when(row['created_at'])}, asked {asked}, {scope}; {'; '.join(figures)}"


def users(rows: Sequence[_Body]) -> Iterator[str]:
    """Yield one line for each user: the day in figures, and what waits."""
    for row in rows:
        figures = [f"{row['requests']} requests and {row['tokens']} tokens today"]
        figures += [f"{n} {state}" for state, n in row["waiting"].items()]
        figures += [f"{row['wishes']} wishes"] if row["wishes"] else []
        figures += [] if row["has_key"] else ["no key"]
        figures += [] if row["train"] else ["never trained on"]
        yield f"{plain(row['user']):<24} {', '.join(figures)}"


def policies(rows: Sequence[_Body]) -> Iterator[str]:
    """Yield one line for each policy: the versions, and what waits."""
    for row in rows:
        figures = [f"version {row['serving']} serves"]
        figures += [] if row["pinned"] is None else [f"pinned at {row['pinned']}"]
        figures += [] if row["tip"] == row["serving"] else [f"version {row['tip']} is the newest trained"]
        figures += [f"{row['waiting']} samples wait"]
        figures += [f"{row['practice_waiting']} of practice"] if row["practice_waiting"] else []
        figures += [] if row["learning"] else ["learning is paused"]
        yield f"{plain(row['policy']):<24} {', '.join(figures)}"


def when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S") if at else "-"


def plain(text: object) -> str:
    """Return the text on one line, without control characters."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "\ufffd" for char in str(text))


def _serving(body: _Body) -> str:
    serving, tip = body["serving"], body["tip"]
    line = f"version {serving} serves" + (" (the base)" if serving == 0 else "")
    if body["pinned"] is not None:
        line += f", pinned at {body['pinned']}"
    if tip != serving:
        line += f"; version {tip} is the newest trained"
        line += "" if body["pinned"] is not None else ", on its way to serve"
    return line


def _learning(body: _Body) -> str:
    training, waiting = body["training"], body["waiting"]
    if not training["enabled"]:
        return "learning is off (training.enabled): turns are recorded and judged, nothing is trained"
    if not body["learning"]:
        return f"learning is paused, {waiting} samples wait (openclaw-rl learning resume)"
    return f"learning is on: {waiting} of the {training['batch_size']} samples of the next step are there"


def _version(row: _Body) -> str:
    origin = "the base" if row["parent"] is None else f"from version {row['parent']}"
    reason = f": {plain(row['reason'])}" if row.get("reason") else ""
    return f"  {row['weight_version']:>5}  {when(row['committed_at'])}  {origin:18}  {row['state']}{reason}"


def _turn(row: _Body) -> tuple[str, ...]:
    verdict = "-" if row["verdict"] is None else f"{row['verdict']:+d}"
    state = _state(row)
    said = row["feedback"]
    if said is not None:
        is_late = row["state"] in ("leased", "trained") and (said > 0) - (said < 0) != row["verdict"]
        state += f" (its user said {said:+g}" + (", too late)" if is_late else ")")
    if row["demonstration_of"] is not None:
        state += f" (a better reply to {row['demonstration_of']})"
    if row.get("practice"):
        state += f" (practice: {_practice(row)})"
    return (
        row["turn_id"],
        when(row["finished_at"]),
        str(row["oldest_version"]),
        f"{row['prompt_tokens']}+{row['response_tokens']}",
        verdict,
        state,
        plain(row["user"]),
        "-" if row["session_id"] is None else plain(row["session_id"]),
    )


def _state(row: _Body) -> str:
    if row["trained_in"] is not None:
        return f"{row['state']} in version {row['trained_in']}"
    return f"{row['state']}: {row['reason']}" if row["reason"] else str(row["state"])


def _practice(row: _Body) -> str:
    """Return what a practice reply rehearses."""
    what = f"wish {row['wish_id']}" if row["practice"] == "wish" else "anchor"
    return what + ("" if row["practice_of"] is None else f", on {row['practice_of']}")


def _said(label: str, message: _Body) -> str:
    said = Message.model_validate(message)
    calls = [plain(f"{call.function.name}({_short(call.function.arguments)})") for call in said.tool_calls or ()]
    return f"  {label:9}{said.role}: {' '.join(filter(None, (_short(words_of(said)), *calls)))}"


def _feedback(said: _Body) -> str:
    value = "" if said["value"] is None else f"{said['value']:+g}"
    words = (f"{name}: {_short(said[name])}" for name in ("comment", "demonstration") if said[name] is not None)
    return "; ".join(filter(None, (value, *words)))


def _short(text: object) -> str:
    words = plain(text).strip()
    return words if len(words) <= _LONGEST_TEXT else f"{words[:_LONGEST_TEXT]} …"


def _line(name: str, counts: Mapping[str, int], meaning: str) -> str:
    return f"  {name:9}{counts[name]:>8}  {meaning}"


def _parts(group: str, counts: Mapping[str, int]) -> str:
    """Return `stale 3, neutral 2` for the counts `dropped.stale` and `dropped.neutral`."""
    found = {name.removeprefix(f"{group}."): n for name, n in counts.items() if name.startswith(f"{group}.")}
    return ", ".join(f"{name} {n}" for name, n in sorted(found.items(), key=lambda item: -item[1]))


def _span(seconds: float) -> str:
    minutes = max(0, round(seconds / 60))
    days, hours = divmod(minutes // 60, 24)
    found: Iterable[str] = (f"{n} {unit}" for n, unit in ((days, "d"), (hours, "h"), (minutes % 60, "min")) if n)
    return " ".join(found) or "less than a minute"
