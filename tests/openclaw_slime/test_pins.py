"""The README says what the code was written against; what slime is told to call is there."""

from importlib import import_module
from pathlib import Path

import pytest

from openclaw_slime.arguments import HOOKS
from openclaw_slime.contracts import PINS

README = (Path(__file__).parents[2] / "slime/README.md").read_text()


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
def test_the_readme_quotes_every_pin(pin):
    assert f"{pin.name} `{pin.version}`" in README.replace("SGLang `", "sglang `")


@pytest.mark.parametrize("path", HOOKS.values())
def test_every_hook_is_there(path):
    module, _, name = path.rpartition(".")
    assert callable(getattr(import_module(module), name))
