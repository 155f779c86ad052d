"""A start looks at the slime that is there: it goes on where it can, says what differs, refuses what cannot work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openclaw_rl.errors import SettingsError
from openclaw_slime.arguments import QWEN3_4B
from openclaw_slime.contracts import FILES, IMAGE_FILES, MEGATRON, is_pinned
from openclaw_slime.doctor import check_start
from openclaw_slime.slime_node import SlimeNode
from openclaw_slime.start_check import check_interpreters

ROOT = Path(__file__).parents[2]
GROUPS, MODEL = "slime/ray/placement_group.py", "slime/backends/megatron_utils/model.py"


def started(tree: Path) -> list[str]:
    said: list[str] = []
    check_start({"SLIME_ROOT": str(tree), "MEGATRON_ROOT": str(tree)}, said.append)
    return [line for line in said if "is not the pin's" not in line and "is missing" not in line]


def edit(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_what_the_plugin_takes_for_granted_is_enough(slime_tree):
    assert started(slime_tree) == []


def test_each_file_that_is_not_the_pins_is_a_line_of_its_own(slime_tree):
    said = []
    check_start({"SLIME_ROOT": str(slime_tree), "MEGATRON_ROOT": str(slime_tree)}, said.append)
    assert f"slime: {GROUPS} is not the pin's" in said
    assert "Megatron-LM: megatron/core/transformer/mlp.py is missing" in said


@pytest.mark.parametrize(
    "newer",
    [
        "create_rollout_manager(args, pg, colocate=False)",
        "create_rollout_manager(args, pg, *, colocate=False, **more)",
        "create_rollout_manager(args, pg, *more)",
    ],
)
def test_a_function_that_grew_what_need_not_be_given_is_called_all_the_same(slime_tree, newer):
    edit(slime_tree / GROUPS, "create_rollout_manager(args, pg)", newer)
    assert started(slime_tree) == []


@pytest.mark.parametrize(
    "newer",
    [
        "create_rollout_manager(args, pg, colocate)",
        "create_rollout_manager(args, pg, *, colocate)",
        "create_rollout_manager(args)",
        "make_rollout_manager(args, pg)",
    ],
)
def test_a_function_that_cannot_be_called_as_we_call_it_is_refused(slime_tree, newer):
    edit(slime_tree / GROUPS, "create_rollout_manager(args, pg)", newer)
    with pytest.raises(SettingsError, match="create_rollout_manager") as caught:
        started(slime_tree)
    assert str(caught.value).startswith(f"slime: {GROUPS}")
    assert "called as create_rollout_manager(args, pg)" in str(caught.value)


def test_what_is_given_by_name_may_stand_anywhere(slime_tree):
    edit(slime_tree / GROUPS, "rollout_manager, actor_cls=None", "rollout_manager, more=None, actor_cls=None")
    assert started(slime_tree) == []
    edit(slime_tree / GROUPS, "rollout_manager, more=None, actor_cls=None", "rollout_manager, more=None")
    with pytest.raises(SettingsError, match="actor_cls="):
        started(slime_tree)


def test_a_line_that_is_gone_is_said_with_what_it_may_cost(slime_tree):
    edit(slime_tree / MODEL, "if valid_step:", "if True:")
    (said,) = started(slime_tree)
    assert said.startswith(f"slime: {MODEL}: train_one_step does not say `if valid_step:`: ")
    assert said.endswith("a step that is not finite may move the weights")


@pytest.mark.parametrize("newer", ["args, groups", "args, pgs, pg=None", "*given"])
def test_what_is_named_otherwise_is_called_and_said(slime_tree, newer):
    edit(slime_tree / GROUPS, "create_rollout_manager(args, pg)", f"create_rollout_manager({newer})")
    (said,) = started(slime_tree)
    assert f"create_rollout_manager({newer}) is called as create_rollout_manager(args, pg)" in said


def test_a_checkout_that_is_not_there_is_refused(slime_tree, tmp_path):
    with pytest.raises(SettingsError, match=r"^Megatron-LM: .*/nowhere holds none"):
        check_start({"SLIME_ROOT": str(slime_tree), "MEGATRON_ROOT": str(tmp_path / "nowhere")}, print)


def test_without_variables_what_would_be_imported_is_looked_at(slime_tree, monkeypatch):
    edit(slime_tree / MODEL, "if valid_step:", "if True:")
    monkeypatch.syspath_prepend(slime_tree)
    said: list[str] = []
    check_start({}, said.append)
    assert any("if valid_step:" in line for line in said)


def test_the_driver_refuses_before_anything_is_imported_or_started(slime_tree, node_config, monkeypatch):
    (slime_tree / GROUPS).unlink()
    for variable in ("SLIME_ROOT", "MEGATRON_ROOT"):
        monkeypatch.setenv(variable, str(slime_tree))
    with pytest.raises(SettingsError, match="create_placement_groups"):
        with SlimeNode.started([], node_config(), ray_address=None, resumed=None):
            pass


@pytest.mark.parametrize("works", [True, False])
def test_the_launch_says_it_before_the_first_process(slime_tree, works):
    """The first process is one that cannot be started: how far it came is what it says."""
    edit(slime_tree / MODEL, "if valid_step:", "if True:")
    if not works:
        (slime_tree / GROUPS).unlink()
    (slime_tree / "policy").mkdir()
    (slime_tree / "policy" / "config.json").write_text(json.dumps(dict(QWEN3_4B)))
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "HF_CKPT": str(slime_tree / "policy"),
        "SAVE_CKPT": str(slime_tree / "data"),
        "SLIME_ROOT": str(slime_tree),
        "MEGATRON_ROOT": str(slime_tree),
        "SERVER_PYTHON": "/no/such/python",
        "JUDGE": "rules",
        "PRM_GPUS": "0",
    }
    command = [ROOT / "openclaw-rl/run_qwen3_4b_openclaw_rl.sh"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    if works:
        assert f"warning: slime: {MODEL}: train_one_step does not say `if valid_step:`" in done.stderr
        assert "error: SERVER_PYTHON /no/such/python: cannot be run" in done.stderr
        assert not (slime_tree / "data").exists()
    else:
        assert done.stderr.startswith(f"error: slime: {GROUPS} has no create_placement_groups")
        assert "server" not in done.stderr


def test_megatron_as_slimes_image_patches_it_is_the_pins():
    for name, digests in IMAGE_FILES[MEGATRON.name].items():
        assert all(is_pinned(MEGATRON, name, digest + 52 * "0") for digest in (FILES[MEGATRON.name][name], *digests))
        assert not is_pinned(MEGATRON, name, 64 * "0")


def test_a_server_environment_that_lacks_a_part_is_named_before_a_model_loads(tmp_path):
    """Without site-packages: the interpreter itself works, and its first import of another project fails."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(SettingsError, match=r"SERVER_PYTHON .*ModuleNotFoundError: No module named"):
        check_interpreters(str(bare), None)
    with pytest.raises(SettingsError, match=r"SERVER_PYTHON .*/none: cannot be run"):
        check_interpreters(str(tmp_path / "none"), None)
    check_interpreters(sys.executable, None)
    with pytest.raises(SettingsError, match="SGLang is not installed there"):
        check_interpreters(sys.executable, sys.executable)
