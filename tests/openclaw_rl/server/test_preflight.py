"""The server names all problems before the engine and the front end load (`tests/cases/test_start.py`: case CL-1)."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.data_dir import DataDir
from openclaw_rl.errors import SettingsError
from openclaw_rl.ledger.open import InstanceLock
from openclaw_rl.server import preflight
from openclaw_rl.settings import load


def said(**more: object) -> list[str]:
    return preflight.problems(load(None, {key.replace("__", "."): value for key, value in more.items()}, {}))


def test_a_sound_start_has_no_problems(tmp_path: Path) -> None:
    assert said(data_dir=str(tmp_path / "new" / "deeper")) == []


def test_each_problem_is_one_line_with_setting_and_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpus_here", lambda: 1)
    (tmp_path / "file").write_text("")
    found = said(
        data_dir=str(tmp_path / "file" / "below"),
        model__path="/data_storage/somebody/model",
        model__chat_template="none.jinja",
        engine__kind="sglang",
        engine__python="/nowhere/bin/python",
        engine__args=["--tp", "3", "--dp=3"],
        trainer__device="cuda:1",
    )
    wanted = [
        ("model.path", "/data_storage/somebody/model"),
        ("model.chat_template", "none.jinja"),
        ("engine.python", "/nowhere/bin/python"),
        ("trainer.device", "cuda:1"),
        ("engine.args", "wants 9 GPUs, 1 are here"),
        ("data_dir", "file"),
    ]
    assert len(found) == len(wanted)
    for (setting, value), line in zip(wanted, found, strict=True):
        assert line.startswith(setting)
        assert value in line
        assert "\n" not in line


def test_several_engines_need_the_gpus_of_all_and_a_kind_that_starts_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "gpus_here", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked = {"data_dir": str(tmp_path), "engine__replicas": 3}
    assert said(**asked, engine__kind="sglang") == []
    (problem,) = said(**asked, engine__kind="sglang", engine__args=["--tp", "2"])
    assert problem == "engine.replicas 3, engine.args '--tp 2': wants 6 GPUs, 4 are here"
    assert said(**asked) == ["engine.replicas 3: engine.kind 'embedded' starts one engine alone"]


def test_slices_of_one_card_count_as_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpus_here", lambda: 1)
    asked = {"data_dir": str(tmp_path), "engine__kind": "sglang", "engine__replicas": 2}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1a,MIG-2b")
    assert said(**asked) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1a")
    assert "engine.replicas 2, engine.args '': wants 2 GPUs, 1 are here" in said(**asked)


@pytest.mark.parametrize(
    ("asked", "setting"),
    [
        ({"engine__kind": "sglang", "engine__args": ["--tp", "2"]}, "engine.args '--tp 2'"),
        (
            {"engine__kind": "sglang", "engine__args": ["--tp", "2"], "engine__replicas": 2},
            "engine.replicas 2, engine.args '--tp 2'",
        ),
        ({"trainer__device": "cuda:1"}, "trainer.device 'cuda:1'"),
    ],
)
def test_a_process_sees_one_slice_of_a_card_alone(
    asked: dict[str, Any], setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1a,MIG-2b,MIG-3c,MIG-4d")
    (problem,) = said(data_dir=str(tmp_path), **asked)
    assert problem == f"{setting}: wants 2 GPUs, and a process sees one MIG slice of CUDA_VISIBLE_DEVICES alone"


def test_a_method_that_is_not_installed_is_refused_before_its_table_is_read() -> None:
    with pytest.raises(SettingsError, match=r"^method\.name: no method 'no-such-method'; installed: [^\n]*$"):
        said(method__name="no-such-method")


@pytest.mark.parametrize(
    ("files", "settings", "says"),
    [
        ({}, {}, "no config.json"),
        ({"config.json": "{}"}, {}, None),
        ({"config.json": "{}"}, {"model__gguf_file": "absent.gguf"}, "absent.gguf does not exist"),
    ],
)
def test_a_models_folder_is_looked_into(
    tmp_path: Path, files: dict[str, str], settings: dict[str, str], says: str | None
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    found = said(data_dir=str(tmp_path), model__path=str(folder), **settings)
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


def test_what_only_the_hub_may_have_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("it looked a name up"))
    assert said(data_dir=str(tmp_path), model__path="somebody/some-model") == []


def test_all_that_is_wrong_with_the_settings_is_one_message(tmp_path: Path) -> None:
    from openclaw_rl.errors import SettingsError

    with pytest.raises(SettingsError) as error:
        load(None, {"server.port": 70000, "judge.votes": 0, "training.batch_size": "many", "engine.knid": "x"}, {})
    lines = str(error.value).split("\n")
    assert [line.split(":")[0] for line in sorted(lines)] == [
        "engine.knid",
        "judge.votes",
        "server.port",
        "training.batch_size",
    ]
    assert any("70000" in line for line in lines)
    with pytest.raises(SettingsError) as error:
        load(None, {"server.host": "0.0.0.0", "engine.kind": "url", "training.min_batch": 17}, {})
    assert len(str(error.value).split("\n")) == 3


def test_a_second_server_is_refused_before_it_writes_what_the_first_ones_engine_reads_at_a_restart(
    tmp_path: Path,
) -> None:
    data = DataDir.prepare(tmp_path)
    (data.run / "engine.json").write_text("the first one's")
    argv = [sys.executable, "-m", "openclaw_rl", "serve", "--data-dir", str(tmp_path), "--port", "0"]
    with InstanceLock.beside(data.ledger):
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr.strip().startswith(f"openclaw-rl: another server (process {os.getpid()}) holds ledger.sqlite3")
    assert "\n" not in ended.stderr.strip()
    assert (data.run / "engine.json").read_text() == "the first one's"
    assert not list(data.logs.iterdir())  # nothing was started


@pytest.mark.parametrize(
    ("nodes", "smi", "here"),
    [
        (["nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"], None, 2),
        (["nvidiactl"], "GPU 0: NVIDIA H100 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: GPU-2)\n", 2),
        (["dxg"], "GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)\n", 1),
        (["dxg"], None, None),
        (["kfd"], None, None),
        (["nvidiactl"], None, None),
        ([], None, 0),
    ],
)
def test_cards_are_counted_where_they_can_be_and_never_denied_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[str], smi: str | None, here: int | None
) -> None:
    for node in nodes:
        (tmp_path / node).touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if smi is not None:
        (tmp_path / "bin").mkdir()
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && printf '{smi}'\n")
        tool.chmod(0o755)
    assert preflight.gpus_here(tmp_path) == here


def test_a_start_that_wants_cards_nobody_can_count_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpus_here", lambda: None)
    assert said(data_dir=str(tmp_path), trainer__device="cuda:1") == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sampling.temperature": 0}, "sampling.temperature = 0: replies"),
        ({"sampling.top_k": 1}, "sampling.top_k = 1: replies"),
        ({"sampling.top_p": 0.9, "sampling.truncated_sampling": "drop"}, 'sampling.truncated_sampling = "drop" with'),
        ({"sampling.top_k": 40, "sampling.truncated_sampling": "drop"}, 'sampling.truncated_sampling = "drop" with'),
        ({"sessions.pair_ttl_s": 1}, "sessions.pair_ttl_s = 1: a turn ends before"),
        ({"method.name": "combine", "method.binary_weight": 0, "method.opd_weight": 0}, "method.binary_weight and"),
        ({"trainer.max_tokens": 64}, "trainer.max_tokens = 64: longer samples are dropped"),
    ],
)
def test_settings_under_which_the_usual_chat_is_never_trained_on_are_told(settings: dict, says: str) -> None:
    (told,) = preflight.hardly_trains(load(None, settings, {}))
    assert told.startswith(says)
    assert preflight.hardly_trains(load(None, settings | {"training.enabled": False}, {})) == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sampling.top_p": 0.9, "sampling.top_k": 40},  # trained on the untruncated log-probs
        {"method.name": "opd"},
        {"method.name": "combine", "method.opd_weight": 0},
        {"trainer.max_tokens": 1024},
        {"trainer.max_tokens": 64, "trainer.kind": "external"},
        {"sampling.temperature": 0.01},
    ],
)
def test_settings_that_train_are_not_told(settings: dict) -> None:
    assert preflight.hardly_trains(load(None, settings, {})) == []
