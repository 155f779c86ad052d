"""An environment beside the pins."""

import hashlib
import importlib.metadata
import sys

import pytest

from openclaw_slime import contracts, doctor


@pytest.fixture
def checkout(slime_tree, monkeypatch):
    """Of a slime with one file that the pins know."""
    digest = hashlib.sha256((slime_tree / "slime/ray/rollout.py").read_bytes()).hexdigest()[:12]
    monkeypatch.setattr(contracts, "FILES", {"slime": {"slime/ray/rollout.py": digest}})
    return slime_tree


def of_slime(checkout):
    return [row for row in doctor.rows({"SLIME_ROOT": str(checkout)}) if row["what"] == "slime"]


def at_commit(checkout, commit):
    (checkout / ".git/refs/heads").mkdir(parents=True)
    (checkout / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (checkout / ".git/refs/heads/main").write_text(commit + "\n")


def test_a_checkout_at_the_pin_is_fine(checkout):
    at_commit(checkout, contracts.SLIME.version + "0" * 32)
    assert [row["level"] for row in of_slime(checkout)] == ["ok"]


def test_another_commit_is_named(checkout):
    at_commit(checkout, "f" * 40)
    (row,) = of_slime(checkout)
    assert row["level"] == "differs"
    assert "ffffffffffff" in row["says"]
    assert contracts.SLIME.version in row["says"]


def test_a_commit_among_packed_refs_is_read(checkout):
    (checkout / ".git").mkdir()
    (checkout / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (checkout / ".git/packed-refs").write_text("# pack-refs\n" + "a" * 40 + " refs/heads/main\n")
    (row,) = of_slime(checkout)
    assert "aaaaaaaaaaaa" in row["says"]


def test_a_changed_file_is_named_whatever_the_commit(checkout):
    file = checkout / "slime/ray/rollout.py"
    file.write_text(file.read_text() + "x = 2\n")
    assert any("slime/ray/rollout.py is not the pin's" in row["says"] for row in of_slime(checkout))


def test_nothing_there_is_missing(tmp_path):
    (row,) = of_slime(tmp_path)
    assert row["level"] == "missing"


def test_it_ends_with_one_where_something_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLIME_ROOT", str(tmp_path))
    assert doctor.main([]) == 1
    assert "! slime" in capsys.readouterr().out


def test_each_missing_part_of_a_node_is_a_line_of_its_own_with_what_mends_it(tmp_path, monkeypatch, capsys):
    """An environment without any of them: nothing is loaded or imported to find that out."""

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    for variable in ("SLIME_ROOT", "MEGATRON_ROOT"):
        monkeypatch.delenv(variable, raising=False)
    imported = set(sys.modules)
    assert doctor.main([]) == 1
    assert not {"ray", "slime", "megatron", "sglang"} & (set(sys.modules) - imported)
    lines = capsys.readouterr().out.splitlines()
    missing = {line[2:].split()[0]: line for line in lines if line.startswith("! ")}
    assert missing.keys() == {"slime", "Megatron-LM", "sglang", "ray", "sglang-router", "torch", "numpy"}
    assert "SLIME_ROOT names no checkout" in missing["slime"]
    assert "MEGATRON_ROOT names no checkout" in missing["Megatron-LM"]
    assert all(pin.version in missing[pin.name] for pin in (*contracts.PINS, *contracts.PACKAGES))
    (other,) = [line for line in lines if line.startswith("? ")]
    assert "transformer-engine" in other
    assert "--no-transformer-engine" in other
