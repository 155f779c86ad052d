"""Stages of a check: each runs within its time limit, writes its figures to OUT/<stage>.json, and fails alone.

A stage is a function of the host that returns its figures. It fails if it raises, if it runs out of time, or if its
figures hold `findings` or an `exit` that is not zero. A failed stage does not stop the stages that follow.
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
from typing import Any, Generic, TypeVar

Host = TypeVar("Host")
Figures = dict[str, Any]
SHOWN = 4000
"""Characters of a stage's figures that are printed; the file holds all of them."""


@dataclass(frozen=True, slots=True)
class Stage(Generic[Host]):
    """One row of a check's table."""

    name: str
    limit_s: int
    """Time limit, if the command line gives none."""
    run: Callable[[Host], Figures]
    text: str
    """One line for `--help`."""
    min_s: int = 5
    """Least time in which the stage shows a result; with less left, the node check skips it."""


def table(*stages: Stage[Host]) -> dict[str, Stage[Host]]:
    """Return the stages by name, in the order in which `--help` lists them."""
    return {stage.name: stage for stage in stages}


class OutOfTime(BaseException):
    """The stage's time limit. Not an Exception, so that an `except Exception` of the stage does not catch it."""


@dataclass(frozen=True, slots=True)
class StageCall:
    """`NAME[=SECONDS][+]` of the command line."""

    name: str
    limit_s: int
    is_beside: bool
    """`+`: the stage runs beside the stages that follow."""

    @classmethod
    def of(cls, word: str, limits: Mapping[str, int]) -> "StageCall":
        """Parse a word of the command line. Raises ArgumentTypeError for a name without a stage."""
        name, _, limit = word.removesuffix("+").partition("=")
        if name not in limits:
            raise argparse.ArgumentTypeError(f"no stage {name!r}: {', '.join(limits)}")
        return cls(name, int(limit or limits[name]), word.endswith("+"))


def parser(doc: str | None, stages: Mapping[str, Stage[Host]]) -> argparse.ArgumentParser:
    """Return the parser with the options that both checks share; `--help` lists the stages."""
    limits = {name: stage.limit_s for name, stage in stages.items()}
    lines = "\n".join(f"  {stage.name:<12} {stage.limit_s:>4} s  {stage.text}" for stage in stages.values())
    made = argparse.ArgumentParser(
        description=doc,
        epilog=f"stages, their time limits, and what they do:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("stages", nargs="+", metavar="STAGE[=SECONDS]", type=lambda word: StageCall.of(word, limits))
    made.add_argument(
        "--work",
        type=_absolute,
        required=True,
        metavar="DIR",
        help="folder that later calls find again (the shell script sets it)",
    )
    made.add_argument(
        "--out",
        type=_absolute,
        required=True,
        metavar="DIR",
        help="folder for figures and logs (the shell script sets it)",
    )
    made.add_argument("--tiny", action="store_true", help="small models, for a rehearsal on a CPU")
    made.add_argument("--streams", type=int, default=32, help="number of chats that run at the same time")
    return made


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def run_stage(name: str, stage: Callable[[], Figures], limit_s: int, file: Callable[[], Path]) -> bool:
    """Run the stage and write its figures; return True if it passed.

    file: returns the path of the figures. It is called after the stage, which may decide the name.
    """

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


def summarise(results: Mapping[str, bool | str]) -> int:
    """Print the last line of the check and return its exit code."""
    print(f"== all: {dict(results)}", flush=True)
    return 0 if all(result is True for result in results.values()) else 1


def output_of(command: Sequence[str]) -> str:
    """Return the standard output of a command, or the error that stopped it."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=40, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return repr(error)
