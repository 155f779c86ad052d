"""Loading and unloading adapters through the engine's client, also where SGLang miscounts who uses one."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from engine_client import request, served

from openclaw_rl.engines.kind import load_kind
from openclaw_rl.errors import EngineRefused
from openclaw_rl.testing import FakeEngine, Scripted


async def test_adapters_change_log_probs_and_unload_waits_for_their_users(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    fake = FakeEngine()
    async with served(fake) as engine:
        await engine.load_adapter("policy-v1", tmp_path)
        with pytest.raises(EngineRefused, match="already loaded"):
            await engine.load_adapter("policy-v1", tmp_path)
        base = await engine.score((1,), (300, 301), lora_path=None, extra_key=None)
        tuned = await engine.score((1,), (300, 301), lora_path="policy-v1", extra_key=None)
        assert base.log_probs != tuned.log_probs
        fake.script(Scripted(ids=(5, 6, 2), hold_after=1))
        async with aclosing(engine.stream(request([1], lora_path="policy-v1"))) as events:
            await anext(events)
            unload = asyncio.create_task(engine.unload_adapter("policy-v1"))
            await engine.model_info()
            assert not unload.done()
            fake.release()
            rest = [token async for event in events for token in event.output_ids]
        await unload
        assert rest == [6, 2]
        assert not fake.adapters


@pytest.mark.parametrize(("kind", "stays"), [("sglang", True), ("url", True), ("embedded", False)])
async def test_an_adapter_whose_requests_sglang_may_have_miscounted_is_not_unloaded(
    tmp_path: Path, kind: str, stays: bool
) -> None:
    """An unload there would wait for ever, and hold up every load. A fresh load of the name starts a fresh count."""
    fake = FakeEngine()
    async with served(fake, loses_adapter_count=load_kind(kind).loses_adapter_count) as engine:
        for name in ("refused", "whole"):
            await engine.load_adapter(name, tmp_path)
        fake.script(Scripted(ids=(), refuse=(400, "too long")))
        with pytest.raises(EngineRefused):
            await engine.generate(request([1], lora_path="refused"))
        await engine.generate(request([1], lora_path="whole"))
        for name in ("refused", "whole"):
            await engine.unload_adapter(name)
        assert list(fake.adapters) == (["refused"] if stays else [])
        fake.adapters.clear()  # it was restarted
        await engine.load_adapter("refused", tmp_path)
        await engine.unload_adapter("refused")
        assert not fake.adapters


async def test_a_stream_that_never_began_leaves_its_adapter_loaded_one_that_did_does_not(tmp_path: Path) -> None:
    fake = FakeEngine()
    async with served(fake) as engine:
        for name in ("never", "begun"):
            await engine.load_adapter(name, tmp_path)
        fake.script(Scripted(ids=(), refuse=(400, "too long")))
        with pytest.raises(EngineRefused):
            async with aclosing(engine.stream(request([1], lora_path="never"))) as events:
                await anext(events)
        async with aclosing(engine.stream(request([1], lora_path="begun"))) as events:
            await anext(events)
        for name in ("never", "begun"):
            await engine.unload_adapter(name)
        assert list(fake.adapters) == ["never"]
