"""The hash of the base that an engine serves, when it reports its hash, its path, or a path of another host."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from openclaw_rl.engines.dialect import ModelInfo
from openclaw_rl.models.identity import hash_tensors
from openclaw_rl.server.startup import served_base_hash
from openclaw_rl.settings import ModelSettings


def folder(root: Path, name: str, seed: int) -> Path:
    where = root / name
    where.mkdir(parents=True)
    torch.manual_seed(seed)
    save_file({"w": torch.randn(3, 3)}, where / "model.safetensors")
    return where


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return folder(tmp_path, "ours", 0)


def served(info: ModelInfo, ours: Path) -> str:
    root = ours.parent
    sent = (root / "versions", root / "push")
    return served_base_hash(info, ModelSettings(path=str(ours)), cache=root / "cache", ours=sent)


def test_an_engine_that_tells_its_hash_is_believed(ours: Path) -> None:
    assert served(ModelInfo(model_path=str(ours), base_hash="abc"), ours) == "abc"


def test_our_own_folder_and_another_on_this_host_are_hashed(ours: Path) -> None:
    other = folder(ours.parent, "other", 1)
    assert served(ModelInfo(model_path=str(ours)), ours) == hash_tensors(ours)
    assert served(ModelInfo(model_path=str(other)), ours) == hash_tensors(other) != hash_tensors(ours)


@pytest.mark.parametrize("where", ["versions/a-lease", "push/weight_v000002"])
def test_an_engine_that_was_pushed_a_version_still_has_our_base(ours: Path, where: str) -> None:
    version = folder(ours.parent, where, 2)
    assert served(ModelInfo(model_path=str(version)), ours) == hash_tensors(ours)


def test_a_folder_on_another_host_is_known_by_its_path(ours: Path) -> None:
    assert served(ModelInfo(model_path="/somewhere/else"), ours) == "path:/somewhere/else"
