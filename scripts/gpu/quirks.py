"""Whether SGLang unloads an adapter after requests under it were refused, aborted and dropped."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from sglang_check import Host


def run(host: "Host") -> dict[str, Any]:
    return asyncio.run(_quirks(host))


async def _quirks(host: "Host") -> dict[str, Any]:
    """Each on an adapter name of its own. An unload that does not come back holds up every later load, so what makes
    one is tried last, and nothing after it.
    """
    (_, folder), *_ = host.adapters.items()
    figures: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=host.engine_url, timeout=10) as http:

        async def body(name: str, ids: list[int], **more: Any) -> dict[str, Any]:
            loaded = await http.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
            assert loaded.status_code == 200, loaded.text
            params = {"max_new_tokens": 400, "temperature": 1.0, "ignore_eos": True}
            return {"input_ids": ids, "lora_path": name, "sampling_params": params, "rid": f"rid-{name}", **more}

        async def dropped(request: dict[str, Any], after_s: float) -> None:
            try:
                await http.post("/generate", json=request, timeout=after_s)
            except httpx.TimeoutException:
                await http.post("/abort_request", json={"rid": request["rid"]})

        async def stream_dropped(request: dict[str, Any]) -> None:
            async with http.stream("POST", "/generate", json=request | {"stream": True}) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data"):
                        break
            await http.post("/abort_request", json={"rid": request["rid"]})

        async def retracted_and_aborted(request: dict[str, Any]) -> None:
            events = []
            async with http.stream("POST", "/generate", json=request | {"stream": True, "return_logprob": True}) as got:
                lines = got.aiter_lines()
                events.append(await anext(lines))
                await http.post("/pause_generation", json={"mode": "retract"})
                await http.post("/abort_request", json={"rid": request["rid"]})
                await http.post("/continue_generation", json={})
                events += [line async for line in lines]
            rows = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
            figures["last events of an abort in the queue: ids, log-probs, tokens so far"] = [
                (
                    row["output_ids"],
                    len(row["meta_info"]["output_token_logprobs"]),
                    row["meta_info"]["completion_tokens"],
                )
                for row in rows[-2:]
            ]

        async def refused(request: dict[str, Any]) -> None:
            await http.post("/generate", json=request)

        for name, what, ids, act in (
            ("streamed", "a dropped stream", [5, 6, 7], stream_dropped),
            ("waited", "a dropped request", [5, 6, 7], lambda request: dropped(request, 0.3)),
            ("queued", "an abort in the queue", [5, 6, 7], retracted_and_aborted),
            ("refused", "a refused request", [5] * 9000, refused),
        ):
            key = f"unloads after {what}"
            try:
                await act(await body(name, ids))
                reply = await http.post("/unload_lora_adapter", json={"lora_name": name}, timeout=6)
                figures[key] = reply.status_code == 200
            except httpx.TimeoutException:
                figures[key] = "never; nothing after it was tried"
                break
        await http.post("/abort_request", json={"abort_all": True})
    return figures
