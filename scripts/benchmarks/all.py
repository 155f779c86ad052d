"""Every figure of speed that has an aim: run its benchmark, and print it beside the aim and the limit of its run.

    scripts/benchmarks.sh all [--only loop_latency,growth] [--read] [--router VENV/bin/python] [--openclaw FOLDER]

The benchmarks run one after the other, each in processes of its own. A *limit* is the same work by a peer or by the
machine itself, measured beside the figure in that run; the *ratio* is the figure over it. The rows go to one JSON file,
and from it to a page. A benchmark that fails, and a figure that this machine cannot measure, keep their rows, with the
reason. `--read` runs nothing: it takes what the benchmarks left in the folder.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.proxy_overhead import COST, CPU, RATE, added

RESULTS = Path(__file__).parent / "results"
ROWS, PAGE = "all.json", "all.md"
Where = tuple[str | int, ...]
"""Keys that lead to a value in a benchmark's JSON."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a benchmark, its aim, and the place of its limit."""

    name: str
    benchmark: str
    where: Where
    aim: float | None = None
    at_least: bool = False
    limit: str = ""
    """The peer, or the machine's own limit; empty without one."""
    limit_where: Where = ()
    of_ratio: bool = False
    """The aim is of the figure over its limit."""
    needs: str = ""
    """The need of this figure beyond two cores."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure."""

    figure: str
    benchmark: str
    value: float | None
    least: float | None
    most: float | None
    limit: str
    limit_value: float | None
    ratio: float | None
    aim: str
    met: bool | None
    """None: not measured, or without an aim."""
    note: str


def _proxy(name: str, figure: str, aim: float | None, beside: str = "relay", **more: Any) -> Figure:
    return Figure(name, "proxy_overhead", ("figures", figure, "ours"), aim, limit=beside,
                  limit_where=("figures", figure, beside), **more)  # fmt: skip


CHAT = "openclaw_chat-"
"""Names of the chats of the real OpenClaw, by the way in which it tells the session."""
_GAPS, _SERVING = "inter-token gap p50 / p99, ms", "last feedback to serving, s"
_DECODE, _SHARES = "8 streams over a batch, decode alone [aim 3]", "shares of limits, median, least, most"
FIGURES = (
    _proxy("added time to first token, next turn, 1 stream, p50, ms", added(1, "p50"), 1.5),
    _proxy("added time to first token, 1 stream, p99, ms", added(1, "p99"), 6.0),
    _proxy("added time to first token, 16 streams, p50, ms", added(16, "p50"), 2.0),
    _proxy("added time to first token, 16 streams, p99, ms", added(16, "p99"), 6.0),
    _proxy("added time to first token, 64 streams of 25 tokens/s, p50, ms", added(64, "p50"), 5.0),
    _proxy("added time, 1 stream, beside LiteLLM", added(1, "p50"), 0.1, "LiteLLM", of_ratio=True),
    _proxy("added time, 16 streams, beside LiteLLM", added(16, "p50"), 0.1, "LiteLLM", of_ratio=True),
    _proxy("added time, 1 stream, beside sglang-router", added(1, "p50"), 3.0, "sglang-router", of_ratio=True),
    _proxy("added time, 16 streams, beside sglang-router", added(16, "p50"), 3.0, "sglang-router", of_ratio=True),
    _proxy("CPU a streamed token, 64 streams, µs", CPU, 1.3, "sglang-router", of_ratio=True),
    _proxy("CPU a streamed token, beside a bare relay", CPU, None),
    _proxy("short requests a second, 16 clients", RATE, 400.0, "sglang-router", at_least=True),
    _proxy("CPU a short request, ms", COST, None, "sglang-router"),
    Figure("embedded decode, 8 streams, times a batched generate", "engine_speed", ("ratios", _DECODE, "median"), 3.0,
           at_least=True),
    Figure("embedded decode, share of copy bandwidth, 8 streams", "engine_speed", (_SHARES, "bandwidth, 8 streams", 0)),
    Figure("embedded prefill, 2k tokens, share of a matmul chain", "engine_speed",
           (_SHARES, "matmul chain, prefill", 0), 0.6, at_least=True),
    Figure("last feedback to serving, 8 short chats, s", "loop_latency", (_SERVING,), 15.0),
    Figure("last feedback to serving, the step, s", "loop_latency", ("its phases, s", "step")),
    Figure("last feedback to serving, the gate, s", "loop_latency", ("its phases, s", "gate")),
    Figure("last feedback to serving, CPU of the trainer, s", "loop_latency", ("CPU, s", "trainer")),
    Figure("last feedback to serving, CPU of the engine, s", "loop_latency", ("CPU, s", "engine")),
    Figure("gap between tokens near a swap, p99, ms", "loop_latency", (_GAPS, "in the publication", 1), 100.0,
           limit="idle", limit_where=(_GAPS, "idle", 1)),
    Figure("gap between tokens in a step, p99, ms", "loop_latency", (_GAPS, "in the step", 1), None,
           limit="idle", limit_where=(_GAPS, "idle", 1)),
    Figure("a practice update of 16 replies, s", "practice_update", ("update, s",), 20.0),
    Figure("a practice update, CPU of the trainer, s", "practice_update", ("CPU, s", "trainer")),
    Figure("a practice update, CPU of the engine, s", "practice_update", ("CPU, s", "engine")),
    Figure("ledger, a million turns over ten thousand, worst p50 of the hot calls", "ledger_scale",
           ("worst ratio of the hot calls, p50 / p99", 0), 1.5),
    Figure("last feedback to serving, 4 turns of the real OpenClaw with headers, s", "openclaw_chat-headers",
           ("last feedback to serving", "total"), 60.0),
    Figure("last feedback to serving, 4 turns of the real OpenClaw without, s", "openclaw_chat-none",
           ("last feedback to serving", "total"), 80.0),
    Figure("start, fresh clone to first reply, packages cached, s", "fresh_start",
           ("from the start, s", "first reply"), 60.0),
    Figure("last feedback to serving, one H200, 0.6B, s", "", (), None, needs="a card: scripts/gpu [1.2]"),
    Figure("trainer, mixed lengths, 4B shape, times padded torch + PEFT", "", (), None,
           needs="a card: scripts/benchmarks.sh trainer_speed --preset gpu [2.2]"),
)  # fmt: skip


def found(tree: Any, where: Where) -> tuple[float, float, float] | None:
    """Return median, least and most of the value at `where`; a list of numbers is one value a round."""
    for key in where:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    match tree:
        case bool():
            return None
        case int() | float():
            return float(tree), float(tree), float(tree)
        case [*values] if values and all(isinstance(value, int | float) for value in values):
            return float(statistics.median(values)), float(min(values)), float(max(values))
    return None


def row_of(figure: Figure, files: Mapping[str, Any], faults: Mapping[str, str]) -> Row:
    """Return the figure's row; files: the JSON of each benchmark that ran."""
    tree = files.get(figure.benchmark)
    value = found(tree, figure.where)
    beside = found(tree, figure.limit_where) if figure.limit_where else None
    ratio = value[0] / beside[0] if value and beside and beside[0] else None
    judged = ratio if figure.of_ratio else value and value[0]
    met = None
    if figure.aim is not None and judged is not None:
        met = judged >= figure.aim if figure.at_least else judged <= figure.aim
    note = figure.needs or faults.get(figure.benchmark, "")
    if not note and value is None:
        note = "not measured"
    if not note and figure.of_ratio and ratio is None:
        note = f"{figure.limit} did not run"
    aim = "" if figure.aim is None else f"{'≥' if figure.at_least else '≤'} {figure.aim:g}"
    middle, least, most = value or (None, None, None)
    return Row(
        figure.name,
        figure.benchmark,
        middle,
        least,
        most,
        limit=figure.limit,
        limit_value=beside[0] if beside else None,
        ratio=ratio,
        aim=f"{aim} ×" if aim and figure.of_ratio else aim,
        met=met,
        note=note,
    )


def page(about: Mapping[str, object], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of the rows. No figure on it is written by hand."""
    of = ", ".join(f"{name} {value}" for name, value in about.items())
    lines = ["# Speed", "", f"Written by `scripts/benchmarks.sh all` from `{ROWS}`: {of}.", ""]
    lines += ["| figure | value (least – most) | limit | ratio | aim | |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        spread = "" if row["least"] == row["most"] else f" ({_short(row['least'])} – {_short(row['most'])})"
        limit = f"{row['limit']} {_short(row['limit_value'])}" if row["limit_value"] is not None else ""
        word = row["note"] or {True: "met", False: "**not met**", None: ""}[row["met"]]
        cells = (row["figure"], _short(row["value"]) + spread, limit, _short(row["ratio"]), row["aim"], word)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def commands(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each benchmark's name, and its module with its flags."""
    peers = [part for name in ("litellm", "router") if (at := getattr(options, name)) for part in (f"--{name}", at)]
    rounds = ["--rounds", str(options.rounds)]
    flags = {"proxy_overhead": [*rounds, *peers], "engine_speed": rounds}
    flags["growth"] = ["--ledger", str(folder / "ledger_scale.json")]
    for name in dict.fromkeys([*(figure.benchmark for figure in FIGURES if figure.benchmark), "growth"]):
        if options.only and name not in options.only.split(","):
            continue
        file = str(folder / f"{name}.json")
        if not name.startswith(CHAT):
            yield name, [f"benchmarks.{name}", *flags.get(name, []), "--out", file]
        elif options.openclaw:
            identity = name.removeprefix(CHAT)
            yield name, ["e2e.openclaw_chat", options.openclaw, "--identity", identity, "--out", file]


def run(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Run the benchmarks. Return the reason of each that failed."""
    faults = {}
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    for name, words in commands(options, folder):
        print(f"-- {name}", flush=True)
        argv = [sys.executable, "-m", *words]
        # A session of its own: the servers of a benchmark that is cut end with it, and do not run beside the next one.
        process = subprocess.Popen(argv, env=environ, start_new_session=True)
        try:
            code = process.wait(60 * options.minutes)
        except subprocess.TimeoutExpired:
            faults[name] = f"not done in {options.minutes:g} minutes"
        else:
            if code:
                faults[name] = f"ended with {code}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="benchmarks to run, with commas between them")
    parser.add_argument("--read", action="store_true", help="run nothing, read the files of --folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60, help="time limit of each benchmark")
    parser.add_argument("--litellm", help="the program `litellm` of an environment of its own")
    parser.add_argument("--router", help="a Python interpreter that has sglang-router")
    parser.add_argument(
        "--openclaw", help="the folder of the real OpenClaw (e2e.openclaw_chat); without it: no chats of it"
    )
    parser.add_argument("--folder", type=Path, default=RESULTS, help="folder of all JSON files and of the page")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, object] = {"cores": os.cpu_count(), "machine": platform.machine()}
    about |= {"Python": platform.python_version(), "load before": round(os.getloadavg()[0], 2)}
    about |= {"free disk, GB": shutil.disk_usage(folder).free // 10**9}
    faults = {} if options.read else run(options, folder)
    files = {}
    for name in {figure.benchmark for figure in FIGURES} | {"growth"}:
        if name and name not in faults and (folder / f"{name}.json").is_file():
            files[name] = json.loads((folder / f"{name}.json").read_text())
    rows = [asdict(row_of(figure, files, faults)) for figure in FIGURES]
    whole = {"about": about, "rows": rows, "growth": files.get("growth", {}).get("columns", [])}
    (folder / ROWS).write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    text = page(about, rows) + growth_table(whole["growth"])
    (folder / PAGE).write_text(text)
    print(text)


def growth_table(columns: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of growth: each figure at its size and at ten times it, flat or with its explanation."""
    if not columns:
        return ""
    lines = ["", "## Growth", "", "| figure | at | value | at | value | ratio | |", "| --- |" + " --- |" * 6]
    for row in columns:
        word = "flat" if row["flat"] else row["explained"]
        sizes = (row["small"], _short(row["small value"]), row["large"], _short(row["large value"]))
        lines.append(f"| {' | '.join((row['figure'], *sizes, _short(row['ratio']), word))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
