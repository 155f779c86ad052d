"""The README says what the code was written against, and what is not there."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from openclaw_slime.arguments import HOOKS
from openclaw_slime.pins import PINS

README = (Path(__file__).parents[2] / "slime/README.md").read_text()


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
def test_the_readme_quotes_every_pin(pin):
    assert f"{pin.name} `{pin.version}`" in README.replace("SGLang `", "sglang `")


@pytest.mark.parametrize("path", HOOKS.values())
def test_a_hook_is_there_or_the_readme_says_that_it_is_not(path):
    module = path.rpartition(".")[0]
    missing = next(line for line in README.splitlines() if "**not built**" in line)
    assert (find_spec(module) is None) == (f"`{module.removeprefix('openclaw_slime.')}`" in missing)
