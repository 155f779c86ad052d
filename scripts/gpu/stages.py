"""Stages of a check, one after another: each within its time, its figures in OUT/<stage>.json, and a failed one does
not stop the others.

A stage is a function that gives its figures. It is good unless it raises, runs out of its time, or its figures hold
`findings` or an `exit` that is not zero.
"""

import argparse
import json
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
SHOWN = 4000
"""Characters of a stage's figures on the terminal; all of them are in its file."""


class OutOfTime(BaseException):
    """The stage's limit came; not an Exception, so that no stage takes it for its own."""


@dataclass(frozen=True, slots=True)
class Asked:
    """`NAME[=SECONDS][+]` of the command line."""

    name: str
    limit_s: int
    is_beside: bool
    """`+`: it runs beside the stages that follow."""

    @classmethod
    def of(cls, word: str, limits: Mapping[str, int]) -> "Asked":
        """Raises ArgumentTypeError for a stage that is none."""
        name, _, limit = word.removesuffix("+").partition("=")
        if name not in limits:
            raise argparse.ArgumentTypeError(f"no stage {name!r}: {', '.join(limits)}")
        return cls(name, int(limit or limits[name]), word.endswith("+"))


def parser(doc: str | None, limits: Mapping[str, int]) -> argparse.ArgumentParser:
    """What both checks are told: their stages, and where things lie. Each adds its own."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("stages", nargs="+", metavar="STAGE[=SECONDS]", type=lambda word: Asked.of(word, limits))
    made.add_argument("--work", type=lambda text: Path(text).absolute(), required=True)
    made.add_argument("--out", type=lambda text: Path(text).absolute(), required=True)
    made.add_argument("--tiny", action="store_true", help="small models, for a try on a CPU")
    made.add_argument("--streams", type=int, default=32)
    return made


def run_stage(name: str, stage: Callable[[], Figures], limit_s: int, file: Callable[[], Path]) -> bool:
    """Whether it was good. `file`: where its figures go, asked when it is over."""

    def on_alarm(*_: object) -> None:
        raise OutOfTime

    started = time.monotonic()
    signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(limit_s)
    print(f"-- {name} (at most {limit_s} s)", flush=True)
    try:
        figures = stage()
        is_good = not figures.get("findings") and not figures.get("exit")
    except (Exception, OutOfTime) as error:
        traceback.print_exc()
        figures, is_good = {"failed": repr(error)[:2000]}, False
    finally:
        signal.alarm(0)
    figures = {"stage seconds": round(time.monotonic() - started, 1), **figures}
    file().write_text(json.dumps(figures, indent=1, default=str) + "\n")
    print(f"== {name}: {json.dumps(figures, default=str)[:SHOWN]}", flush=True)
    return is_good


def told(results: Mapping[str, bool | str]) -> int:
    """The last line, and the exit code of the check."""
    print(f"== all: {dict(results)}", flush=True)
    return 0 if all(result is True for result in results.values()) else 1


def said(command: Sequence[str]) -> str:
    """What a command prints, or why it does not."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=40, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return repr(error)
