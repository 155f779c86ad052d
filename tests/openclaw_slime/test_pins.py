"""The README says what the code was written against; what slime is told to call is there."""

import itertools
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from openclaw_slime.arguments import HOOKS
from openclaw_slime.contracts import PINS

ROOT = Path(__file__).parents[2]
README = (ROOT / "slime/README.md").read_text()


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
def test_the_readme_quotes_every_pin(pin):
    assert f"{pin.name} `{pin.version}`" in README.replace("SGLang `", "sglang `")


def test_no_extra_installs_another_slime_or_megatron_than_the_pins():
    """The package `slime` of PyPI is another project, and `megatron-core` there lacks the trainer that slime starts."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = " ".join(itertools.chain.from_iterable(extras.values()))
    assert "slime" not in extras
    assert not [name for name in ("megatron", "sglang", "ray") if name in packages]
    page = (ROOT / "instructions/node.md").read_text()
    assert "`megatron-core` on PyPI" in page


@pytest.mark.parametrize("path", HOOKS.values())
def test_every_hook_is_there(path):
    module, _, name = path.rpartition(".")
    assert callable(getattr(import_module(module), name))
