"""The documents say what the code was written against and what ran; what slime is told to call is there."""

import itertools
import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from openclaw_slime.arguments import HOOKS
from openclaw_slime.contracts import IMAGE, PINS, SLIME

ROOT = Path(__file__).parents[2]
README = (ROOT / "slime/README.md").read_text()
NODE = (ROOT / "instructions/node.md").read_text()


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
def test_the_readme_quotes_every_pin(pin):
    assert f"{pin.name} `{pin.version}`" in README.replace("SGLang `", "sglang `")


def test_no_extra_installs_another_slime_or_megatron_than_the_pins():
    """The package `slime` of PyPI is another project, and `megatron-core` there lacks the trainer that slime starts."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = " ".join(itertools.chain.from_iterable(extras.values()))
    assert "slime" not in extras
    assert not [name for name in ("megatron", "sglang", "ray") if name in packages]
    assert "`megatron-core` on PyPI" in NODE


def test_the_first_commands_are_the_pins_and_wait_for_what_they_need():
    first, *others = commands = NODE.partition("```sh\n")[2].partition("```")[0].splitlines()
    assert len(commands) <= 12
    assert IMAGE in first
    assert IMAGE in README
    assert f"git -C ~/slime checkout -q {SLIME.version}" in others[0]
    (start,) = (n for n, line in enumerate(commands) if line.endswith(" &"))
    assert "--retry-connrefused" in commands[start + 1], "the server listens only after the judge has loaded"
    (train,) = (n for n, line in enumerate(commands) if "train --now" in line)
    assert "sampled +[1-9]" in commands[train - 1], "the verdict comes seconds after the second chat"


def test_the_readmes_figures_of_kills_are_those_of_the_log():
    """Each row names the parts that were killed; the server, whose death cuts chats, has a row of its own."""
    log = (ROOT / "scripts/benchmarks/results/node_kills-h200.log").read_text()
    chats = r"^{}\b.* (\d+) answered, 0 refused, 0 cut"
    parts = ("driver", "Ray's head", "PRM", "policy engine")
    answered = sum(int(re.search(chats.format(part), log, re.MULTILINE)[1]) for part in parts)
    cut, refused = re.search(r"^our server .* (\d+) running cut, (\d+) tries refused", log, re.MULTILINE).groups()
    rows = [row for row in (ROOT / "README.md").read_text().splitlines() if "kill" in row and row.startswith("| the ")]
    by_check, by_script, server = rows
    assert "Ray's head, and on two of a Megatron worker and SGLang" in by_check
    assert f"driver, Ray's head, judge and policy engine | {answered:,} replies: 0 refused, 0 cut" in by_script
    assert f"its server | {cut} running chats cut, {refused} tries refused" in server


@pytest.mark.parametrize("path", HOOKS.values())
def test_every_hook_is_there(path):
    module, _, name = path.rpartition(".")
    assert callable(getattr(import_module(module), name))
