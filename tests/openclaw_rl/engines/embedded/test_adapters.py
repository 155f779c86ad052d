import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openclaw_rl.engines.embedded.adapters import Adapters
from openclaw_rl.engines.embedded.runner import Adapter
from openclaw_rl.errors import EngineRefused


class Store:
    """What the registry loads from and drops into."""

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self.adapters = Adapters(self.load, self.drop)

    def load(self, name: str, folder: Path) -> Adapter:
        return Adapter(name, folder)

    async def drop(self, adapter: Adapter) -> None:
        self.dropped.append(adapter.name)


async def test_an_unload_waits_for_every_holder_and_is_closed_to_new_ones():
    store = Store()
    await store.adapters.load("a", Path("a"))
    first, second = store.adapters.hold("a"), store.adapters.hold("a")
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        unloading = tasks.create_task(store.adapters.unload("a"))
        await asyncio.sleep(0)
        with pytest.raises(EngineRefused, match="not loaded"):
            store.adapters.hold("a")
        store.adapters.release(first)
        await asyncio.sleep(0)
        assert not unloading.done()
        assert store.dropped == []
        store.adapters.release(second)
    assert store.dropped == ["a"]


async def test_a_name_may_come_again_while_the_old_one_is_still_held():
    store = Store()
    await store.adapters.load("a", Path("old"))
    old = store.adapters.hold("a")
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(store.adapters.unload("a"))
        await asyncio.sleep(0)
        await store.adapters.load("a", Path("new"))
        new = store.adapters.hold("a")
        assert (old.weights, new.weights) == (Path("old"), Path("new"))
        assert old != new
        store.adapters.release(old)
    store.adapters.release(new)
    assert store.adapters.names == ["a"]


async def test_a_load_that_fails_leaves_the_name_free():
    store = Store()

    def refuse(name: str, folder: Path) -> Adapter:
        raise EngineRefused("no", status=400)

    adapters = Adapters(refuse, store.drop)
    for _ in range(2):
        with pytest.raises(EngineRefused, match="no"):
            await adapters.load("a", Path("a"))
    assert adapters.names == []


async def test_the_base_needs_no_adapter():
    assert Store().adapters.hold(None) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config, tensors: config.update(use_dora=True), "plain LoRA"),
        (lambda config, tensors: config.update(bias="all"), "plain LoRA"),
        (
            lambda config, tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 48)}),
            "no place",
        ),
        (lambda config, tensors: tensors.pop(next(iter(tensors))), "does not fit"),
        (
            lambda config, tensors: tensors.update({key: value[:, :-1] for key, value in tensors.items()}),
            "does not fit",
        ),
        (
            lambda config, tensors: tensors.update(
                {next(iter(tensors)).replace("layers.0.", "layers.7."): torch.zeros(4, 48)}
            ),
            "no place",
        ),
    ],
)
async def test_what_would_be_served_wrong_is_refused(make_tiny, start_engine, tmp_path, change, message):
    tiny = make_tiny("llama")
    folder = tmp_path / "adapter"
    shutil.copytree(tiny.adapters["one"], folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    change(config, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "adapter_model.safetensors")
    async with start_engine(tiny.folder) as engine:
        with pytest.raises(EngineRefused, match=message):
            engine.runner.load_adapter("x", folder)


async def test_torn_files_are_refused(make_tiny, start_engine, tmp_path):
    tiny = make_tiny("llama")
    folder = tmp_path / "adapter"
    shutil.copytree(tiny.adapters["one"], folder)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    async with start_engine(tiny.folder) as engine:
        for _ in range(2):
            with pytest.raises(EngineRefused, match="not a PEFT adapter"):
                engine.runner.load_adapter("x", folder)
            (folder / "adapter_config.json").write_text("{")
