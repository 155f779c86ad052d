"""Defaults that were measured for a method on the bundled model: where they hold, and who wins over them."""

from pathlib import Path
from typing import Any

import pytest
from plug_in import install
from typer.testing import CliRunner

from openclaw_rl.cli.main import app
from openclaw_rl.methods.base import load_method
from openclaw_rl.settings import Settings, load, settings_class, tuned

KEYS = [(method, key) for method, values in tuned.BUNDLED.items() for key in values]


def branches(method: str) -> Settings:
    """The defaults of the branches, for the method."""
    return Settings(method=settings_class(method)())


def value(settings: Settings, key: str) -> Any:
    branch, name = key.split(".")
    return getattr(getattr(settings, branch), name)


def test_the_methods_are_ours_and_every_key_stands_in_the_tree_with_a_value_it_takes() -> None:
    for method, values in tuned.BUNDLED.items():
        assert load_method(method).name == method
        plain, own = branches(method), load(None, {"model.path": "m", "method.name": method} | dict(values), {})
        for key in values:
            assert value(own, key) == values[key] != value(plain, key), key


@pytest.mark.parametrize("method", tuned.BUNDLED)
def test_they_are_the_defaults_for_the_bundled_model(method: str) -> None:
    settings, plain = load(None, {"method.name": method}, {}), branches(method)
    taught = tuned.BUNDLED[method]
    assert tuned.in_force(settings) == taught
    for name, branch in plain:
        if hasattr(branch, "model_fields_set"):
            for field in type(branch).model_fields:
                key = f"{name}.{field}"
                assert value(settings, key) == taught.get(key, getattr(branch, field)), key
    assert settings.model_validate(settings.model_dump()) == settings
    assert load(None, {}, {}) == load(None, {"method.name": "binary_rl"}, {})


@pytest.mark.parametrize(
    "more",
    [
        {"model.path": "Qwen/Qwen3-0.6B"},
        {"trainer.kind": "external"},
        {"training.weights": "full"},
        {"method.name": "somebodys_own"},
    ],
    ids=str,
)
def test_elsewhere_the_cautious_ones_stay(
    more: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "somebodys_own", "from openclaw_rl.methods.binary_rl import METHOD\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = load(None, more, {})
    assert tuned.defaults(settings) is None
    assert tuned.in_force(settings) == {}
    assert all(value(settings, key) == value(Settings(), key) for method, key in KEYS if method == "binary_rl")


@pytest.mark.parametrize(("method", "guidance"), [("opd", 3), ("combine", 2)])
def test_a_value_that_the_users_own_exclude_is_left_out(method: str, guidance: float) -> None:
    """Guidance is for the base as the teacher."""
    settings = load(None, {"method.name": method, "method.teacher": "policy"}, {})
    assert value(settings, "method.guidance") == 0
    assert "method.guidance" not in tuned.in_force(settings)
    assert settings.model_validate(settings.model_dump()) == settings
    assert value(load(None, {"method.name": method}, {}), "method.guidance") == guidance
    for more in ({"model.path": "Qwen/Qwen3-0.6B"}, {"trainer.kind": "external"}):
        assert value(load(None, {"method.name": method} | more, {}), "method.guidance") == 0


@pytest.mark.parametrize(("method", "key"), KEYS)
@pytest.mark.parametrize("source", ["file", "environment", "command line"])
@pytest.mark.parametrize("is_cautious", [True, False], ids=["the branch's value", "another"])
def test_what_a_user_sets_wins_and_leaves_the_others(
    method: str, key: str, source: str, is_cautious: bool, tmp_path: Path
) -> None:
    cautious = value(branches(method), key)
    other_value = "none" if isinstance(cautious, str) else 7 if isinstance(cautious, int) else 0.5
    can_say = cautious != "" or source != "environment"  # an empty variable counts as unset
    own = cautious if is_cautious and can_say else other_value
    file, branch, name = tmp_path / "settings.toml", *key.split(".")
    file.write_text(f"[{branch}]\n{name} = {own!r}\n" if source == "file" else "")
    environ = {f"OPENCLAW_RL__{branch}__{name}".upper(): str(own)} if source == "environment" else {}
    settings = load(file, {"method.name": method} | ({key: str(own)} if source == "command line" else {}), environ)
    assert value(settings, key) == own
    rest = {other: told for other, told in tuned.BUNDLED[method].items() if other != key}
    assert tuned.in_force(settings) == rest
    assert {other: value(settings, other) for other in rest} == rest


def test_a_program_that_builds_its_own_tree_gets_the_branches_alone() -> None:
    assert tuned.in_force(Settings()) == {}
    told = [(method, *item) for method, values in tuned.BUNDLED.items() for item in values.items()]
    assert all(value(branches(method), key) != said for method, key, said in told)


def test_the_command_says_where_such_a_value_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def line(*flags: str) -> str:
        printed = CliRunner().invoke(app, ["settings", *flags]).output
        return next(row for row in printed.splitlines() if row.startswith("trainer.learning_rate "))

    note = "    # Measured for this method on the bundled model; 0.0003 for others."
    assert line() == f"trainer.learning_rate = 0.001{note}"
    assert line("--set", "trainer.learning_rate=0.01") == "trainer.learning_rate = 0.01"
    assert line("--set", "model.path=other") == "trainer.learning_rate = 0.0003"


def test_the_documents_tell_them() -> None:
    root = Path(__file__).parents[3]
    text = " ".join((root / "openclaw-rl" / "README.md").read_text().split())
    for key, told in tuned.BUNDLED["binary_rl"].items():
        shown = f"{told:g}".replace("0.001", "1e-3") if isinstance(told, float) else told
        assert f"`{key}={shown}`" in text, key
