"""Stand-in for SGLang's server on a machine without a GPU: its command line, with the embedded engine behind it.

It adds the routes that the checks need of SGLang and the embedded engine lacks: `/server_info`, a checksum of each
tensor, and a plain `/v1/chat/completions` to compare the proxy with.
"""

import argparse
import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse

from openclaw_rl.engines.embedded.config import EngineConfig
from openclaw_rl.log import configure as configure_log
from openclaw_rl.settings import EngineSettings, ModelSettings

if TYPE_CHECKING:
    from openclaw_rl.engines.embedded.server import Service

CHAT_FIELDS = {"max_tokens": "max_new_tokens", "temperature": "temperature", "ignore_eos": "ignore_eos"}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--incremental-streaming-output", action="store_true")
    return parser.parse_known_args()[0]  # flags for memory, kernels and adapters need a card


def _with_more(service: "Service", options: argparse.Namespace) -> FastAPI:
    from transformers import AutoTokenizer

    from openclaw_rl.engines.embedded.server import build_app

    app = build_app(service)
    tokenizer = AutoTokenizer.from_pretrained(options.model_path)

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {"model_path": str(options.model_path), "enable_deterministic_inference": True}

    @app.post("/weights_checker")
    async def weights_checker(body: dict[str, str]) -> dict[str, Any]:
        return {"ranks": [{"checksums": await asyncio.to_thread(_checksums, Path(service.info.model_path))}]}

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> Response:
        if not body.get("stream"):  # a judge's request, which names the form of the answer
            text = _formed(body.get("regex"))
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            return JSONResponse({"choices": [choice], "usage": {"completion_tokens": len(text)}})
        encoded = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True)
        params = {name: body[field] for field, name in CHAT_FIELDS.items() if field in body}
        request = {"input_ids": encoded["input_ids"], "sampling_params": params, "stream": True}
        return StreamingResponse(_chunks(request | {"return_logprob": True}), media_type="text/event-stream")

    async def _chunks(request: dict[str, Any]) -> AsyncIterator[str]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{options.port}", timeout=60) as client:
            async with client.stream("POST", "/generate", json=request) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        text = tokenizer.decode(json.loads(line[6:])["output_ids"])
                        yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n"
        yield "data: [DONE]\n\n"

    return app


def _formed(form: str | None) -> str:
    """Return an answer of that form, one of the three that a check asks for."""
    if form is None:
        return "no vote"
    if thought := re.match(r"<think>\[0-9\]\{(\d+)\}", form):
        hint = re.findall(r"\[HINT_START\\\]([^\\]*)", form)[0]
        return f"<think>{'7' * int(thought[1])}</think>\n\\boxed{{1}}\n[HINT_START]{hint}[HINT_END]"
    return "\\boxed{1}\n[HINT_START]Leave out what is obvious[HINT_END]" if "HINT_START" in form else "\\boxed{-1}"


def _checksums(folder: Path) -> dict[str, str]:
    import torch
    from safetensors.torch import load_file

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[name] = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return found


def main() -> None:
    options = _options()
    from openclaw_rl.engines.embedded import process  # imports torch, which takes seconds

    config = EngineConfig(
        model=ModelSettings(path=str(options.model_path), context_length=options.context_length),
        engine=EngineSettings(threads=1),
        port=options.port,
        cache_dir=options.model_path.parent / "stand-in-cache",
    )
    configure_log(config.log_level, process="engine")
    process.build_app = lambda service: _with_more(service, options)
    asyncio.run(process.serve(config))


if __name__ == "__main__":
    main()
