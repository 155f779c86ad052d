"""The reference pages are those that the code makes: `scripts/reference.py` writes them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "reference.py"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_up_to_date(reference: ModuleType) -> None:
    for name, text in reference.pages().items():
        assert (ROOT / "instructions" / name).read_text() == text, f"run {SCRIPT.relative_to(ROOT)}"


def test_each_setting_of_each_method_has_a_row(reference: ModuleType) -> None:
    text = reference.pages()["settings.md"]
    for key in ("data_dir", "server.port", "method.baseline", "method.hint_source", "practice.idle_s"):
        assert text.count(f"| `{key}` |") >= 1
    assert "| `server.port` | 30000 |" in text


def test_each_command_has_its_options(reference: ModuleType) -> None:
    text = reference.pages()["commands.md"]
    for command in ("serve", "wishes general", "connect openclaw"):
        assert f"## openclaw-rl {command}" in text
    assert "`--batch-size VALUE`" in text
