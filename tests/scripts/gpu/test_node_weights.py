"""The check that an engine's weights are Megatron's export: on a toy engine that fuses small tensors as SGLang does."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu import node_weights


@pytest.fixture
def immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_weights, "AGAIN_S", 0.0)


class ToyEngine:
    """`/model_info`, `/weights_checker`, `/update_weights_from_disk` of SGLang, over fused tensors of two ranks."""

    def __init__(self, folder: Path) -> None:
        self.version = "default"
        self._load(folder)

    def _load(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        fused = torch.cat([tensors[f"{name}_proj"] for name in "qkv"])
        self.ranks = [{"qkv_proj": half, "norm": tensors["norm"].clone()} for half in fused.chunk(2)]

    def push(self, folder: Path, version: int) -> None:
        self._load(folder)
        self.version = str(version)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/model_info":
            return httpx.Response(200, json={"weight_version": self.version})
        body = json.loads(request.content)
        if request.url.path == "/update_weights_from_disk":
            self.push(Path(body["model_path"]), int(body["weight_version"]))
            return httpx.Response(200, json={"success": True})
        assert (request.url.path, body) == ("/weights_checker", {"action": "checksum"})
        ranks = [{"checksums": {name: _hash(tensor) for name, tensor in rank.items()}} for rank in self.ranks]
        return httpx.Response(200, json={"success": True, "ranks": ranks})


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def export(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    tensors = {f"{name}_proj": torch.randn(4, 6, dtype=torch.bfloat16) for name in "qkv"}
    save_file(tensors | {"norm": torch.ones(6, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self.serving = folder, 0
        self.base = export(folder / "base", 0)
        self.engine = ToyEngine(self.base)
        client = httpx.Client(transport=httpx.MockTransport(self.engine), base_url="http://engine")
        self.checked = node_weights.CheckedEngine(client)
        self.watch = node_weights.ServedWeights(self.checked, lambda: self.serving)
        self._compare: Callable[..., dict] = node_weights.compare

    def serve(self, version: int) -> None:
        self.engine.push(self.folder / f"versions/full-{version}", version)
        self.serving = version
        self.watch.take()

    def findings(self, *durable: int) -> list[str]:
        rows = [{"weight_version": 0, "folder": None, "durable": True}]
        rows += [{"weight_version": n, "folder": f"versions/full-{n}", "durable": n in durable} for n in (1, 2, 3)]
        self.watch.keep(self.folder / "weights.json", rows)
        kept = json.loads((self.folder / "weights.json").read_text())
        self.figures = self._compare(self.checked, kept, self.base, self.folder)
        return self.figures["findings"]


@pytest.fixture
def world(immediate: None, tmp_path: Path) -> World:
    world = World(tmp_path)
    for n in (1, 2, 3):
        export(tmp_path / f"versions/full-{n}", n)
    world.watch.take()
    return world


def test_weights_that_arrived_whole_are_the_export(world: World) -> None:
    for n in (1, 2, 3):
        world.serve(n)
    assert world.findings(2) == []
    assert world.figures["version 2"] == {"tensors": 4, "differ": 0, "moved": 2}
    assert sorted(world.figures) == ["findings", "version 0", "version 2"]  # 1 and 3 are on no disk


@pytest.mark.parametrize("fault", ["one bit", "a stale rank", "swapped halves"])
def test_weights_that_did_not_arrive_whole_are_found(world: World, fault: str) -> None:
    old = world.engine.ranks
    world.engine.push(world.folder / "versions/full-1", 1)
    ranks = world.engine.ranks
    if fault == "one bit":
        ranks[1]["qkv_proj"] = ranks[1]["qkv_proj"].clone()
        ranks[1]["qkv_proj"].view(torch.int16)[0, 0] ^= 1
    elif fault == "a stale rank":
        ranks[0] = old[0]
    else:
        ranks[0]["qkv_proj"], ranks[1]["qkv_proj"] = ranks[1]["qkv_proj"], ranks[0]["qkv_proj"]
    world.serving = 1
    world.watch.take()
    n = 2 if fault == "swapped halves" else 1
    assert world.findings(1) == [f"version 1: {n} of 4 tensors are not the export's"]


def test_what_is_held_while_a_push_is_on_its_way_is_not_taken_for_a_version(world: World) -> None:
    world.engine.push(world.folder / "versions/full-1", 1)
    world.watch.take()  # the server does not say yet that it serves
    assert sorted(world.watch.taken) == [0]


def test_nothing_to_compare_is_a_finding(world: World) -> None:
    world.watch.taken.clear()
    assert world.findings(1) == ["no version was both looked at and exported (no look succeeded)"]
