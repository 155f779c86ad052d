"""Compares an environment with the pins: `PYTHON -m openclaw_slime.doctor [--json]`, by slime's own interpreter.

Reports what is installed, its place, and how it differs from the pins. It imports no checked package, so it needs no
GPU and one second. It reads a checkout's commit from its `.git`, compares the files that we rely on one by one, and
checks slime's against the contracts (`contracts`). A start does the same (`check_start`), and goes on if it can:
another commit is the user's choice. Standard library and our own modules only.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

from openclaw_rl.errors import SettingsError
from openclaw_slime import contracts


class Row(TypedDict):
    """One finding, in the wire format of `openclaw_rl.cli.doctor.Finding`."""

    what: str
    level: str
    says: str


def rows(environ: Mapping[str, str]) -> Iterator[Row]:
    """Yield the findings on every pinned part."""
    yield from checkouts(environ)
    for pin in (contracts.SGLANG, *contracts.PACKAGES):
        yield _package(pin)
    yield _numpy()
    yield _transformer_engine()


def checkouts(environ: Mapping[str, str]) -> Iterator[Row]:
    """Yield the findings on slime and Megatron-LM. A part that differs may work; a missing one cannot."""
    for pin, variable in ((contracts.SLIME, "SLIME_ROOT"), (contracts.MEGATRON, "MEGATRON_ROOT")):
        yield from _checkout(pin, variable, environ.get(variable))


def check_start(environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """Warn of each difference, before the first process starts.

    Raises SettingsError for a checkout that is missing, or a function that cannot be called as we call it.
    """
    found = list(checkouts(environ))
    if problems := [f"{row['what']}: {row['says']}" for row in found if row["level"] == "missing"]:
        raise SettingsError("\n".join(problems))
    for row in found:
        if row["level"] == "differs":
            warn(f"{row['what']}: {row['says']}")


def _row(what: str, level: str, says: str) -> Row:
    return {"what": what, "level": level, "says": says}


def _checkout(pin: contracts.Pin, variable: str, root: str | None) -> Iterator[Row]:
    proof = Path(*pin.module.split("."))
    places = [Path(root)] if root else _holding(proof.parts[0])
    place = next((p for p in places if (p / proof).is_dir() or (p / proof).with_suffix(".py").is_file()), None)
    if place is None:
        where = f"{root} holds none" if root else f"not on the path, and {variable} names no checkout"
        yield _row(pin.name, "missing", f"{where}; the pin is {pin.version}")
        return
    commit = _commit(place)
    if commit is not None and not (commit.startswith(pin.version) or pin.version.startswith(commit)):
        yield _row(pin.name, "differs", f"{place} is at {commit[:12]}, the pin is {pin.version[:12]}")
    elif commit is not None:
        yield _row(pin.name, "ok", f"{place} at the pin {pin.version[:12]}")
    else:
        yield _row(pin.name, "ok", f"{place}, no commit to read; its files follow")
    for name in contracts.FILES.get(pin.name, {}):
        file = place / name
        if not file.is_file():
            yield _row(pin.name, "differs", f"{name} is missing")
        elif not contracts.is_pinned(pin, name, hashlib.sha256(file.read_bytes()).hexdigest()):
            yield _row(pin.name, "differs", f"{name} is not the pin's")
    if pin is contracts.SLIME:
        yield from _contracts(place)


def _contracts(slime: Path) -> Iterator[Row]:
    for call in contracts.CALLS:
        if (says := contracts.broken(slime, call)) is not None:
            yield _row(contracts.SLIME.name, "missing", says)
        elif (says := contracts.renamed(slime, call)) is not None:
            yield _row(contracts.SLIME.name, "differs", says)
    for line in contracts.LINES:
        if (says := contracts.gone(slime, line)) is not None:
            yield _row(contracts.SLIME.name, "differs", says)


def _holding(package: str) -> list[Path]:
    """Return the folders that a package would be imported from: of a path, a `.pth` or an editable install."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return []
    return [] if spec is None else [Path(place).parent for place in spec.submodule_search_locations or ()]


def _commit(place: Path) -> str | None:
    git = place / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            return (git / name).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[0] for line in packed if line.endswith(" " + name)), None)


def _package(pin: contracts.Pin) -> Row:
    try:
        found = importlib.metadata.version(pin.name)
    except importlib.metadata.PackageNotFoundError:
        return _row(pin.name, "missing", f"is not installed; the pin is {pin.version}")
    if found.split("+")[0] == pin.version:
        return _row(pin.name, "ok", found)
    return _row(pin.name, "differs", f"{found}, the pin is {pin.version}")


def _numpy() -> Row:
    try:
        found = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        return _row("numpy", "missing", "is not installed")
    if found.startswith("1."):
        return _row("numpy", "ok", found)
    return _row("numpy", "missing", f"{found}: slime stops at an assertion that wants NumPy 1 (initialize.py)")


def _transformer_engine() -> Row:
    if find_spec("transformer_engine") is not None:
        return _row("transformer-engine", "ok", "installed")
    return _row("transformer-engine", "differs", "not installed: start with --no-transformer-engine (our layer spec)")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m openclaw_slime.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line for openclaw-rl doctor")
    given = parser.parse_args(argv)
    found = list(rows(os.environ))
    if given.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        marks = {"ok": "  ", "differs": "? ", "missing": "! "}
        sys.stdout.writelines(f"{marks[row['level']]}{row['what']:<18} {row['says']}\n" for row in found)
    return int(any(row["level"] == "missing" for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
