"""The dialect's conformance suite, over HTTP, against any engine.

Without options it starts the embedded engine on a tiny random model. Against a real SGLang (with
`--incremental-streaming-output --enable-lora --enable-priority-scheduling --max-lora-rank 16 --lora-target-modules
all`):

    pytest tests/conformance --engine-url http://127.0.0.1:30001 --adapter NAME_A=FOLDER --adapter NAME_B=FOLDER

where the two folders are PEFT adapters of the served base; without them the adapter tests are skipped, and say so.
`--other-weights FOLDER` names other weights of the same shape, for the swap of the engine's own. A
random model is best: nearly flat distributions make an end token by chance rare. Start it with
`SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0`, as our launcher does. Where SGLang differs by design a test says how:

* a streamed request that is refused has been answered 200 already, and the refusal is its only event;
* seeds repeat a reply only with `--enable-deterministic-inference`, and without it two tokens that are equal in bf16
  may change places from one run to the next.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 512
VOCAB = 512
END = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--engine-url", default=None, help="run against this engine in place of a fresh embedded one")
    group.addoption(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a PEFT adapter of that engine's base (twice)",
    )
    group.addoption("--other-weights", default=None, help="a folder with other weights of that engine's model")
    group.addoption(
        "--engine-vocab", type=int, default=VOCAB, help="ids below this are ordinary tokens of that engine's model"
    )


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    adapters: dict[str, Path]
    """Not loaded; two of them, with different effects. Empty: adapters cannot be tested."""
    weights: tuple[Path, Path] | None
    """The model's own folder, and one with other weights of the same shape."""
    context_length: int
    vocab: int
    is_ours: bool
    end_id: int | None
    """An end token of the model, when known."""
    is_deterministic: bool = True
    """Equal requests give equal replies, and seeds are honoured."""


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    url = request.config.getoption("engine_url", default=None)
    if url:
        info = httpx.get(f"{url}/model_info").json()
        server_info = httpx.get(f"{url}/server_info").json() if not info.get("base_hash") else {}
        httpx.post(f"{url}/flush_cache")
        config = json.loads((Path(info["model_path"]) / "config.json").read_text())
        adapters = dict(entry.split("=", 1) for entry in request.config.getoption("adapter"))
        other = request.config.getoption("other_weights")
        yield Served(
            url,
            {name: Path(folder) for name, folder in adapters.items()},
            (Path(info["model_path"]), Path(other)) if other else None,
            info.get("context_length") or server_info.get("context_length") or config["max_position_embeddings"],
            request.config.getoption("engine_vocab"),
            is_ours=False,
            end_id=None,
            is_deterministic="base_hash" in info or bool(server_info.get("enable_deterministic_inference")),
        )
        return
    root = tmp_path_factory.mktemp("engine")
    model, adapters = make_model(root)
    process, url = start_engine(root, model)
    try:
        yield Served(url, adapters, (model, root / "other"), CONTEXT, VOCAB, is_ours=True, end_id=END)
    finally:
        process.terminate()
        assert process.wait(timeout=120) == 0


def make_model(root: Path) -> tuple[Path, dict[str, Path]]:
    """A tiny random Llama and two adapters that change it visibly."""
    import torch

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=END,
        bos_token_id=1,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(root / "model")
    LlamaForCausalLM(config).save_pretrained(root / "other")
    adapters = {}
    for seed, name in enumerate(("adapter-a", "adapter-b"), start=1):
        torch.manual_seed(seed)
        lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        peft = get_peft_model(LlamaForCausalLM.from_pretrained(root / "model"), lora)
        peft.save_pretrained(root / name)
        adapters[name] = root / name
    return root / "model", adapters


def start_engine(root: Path, model: Path) -> tuple[subprocess.Popen[bytes], str]:
    port_file = root / "port.json"
    config = {
        "model": {"path": str(model)},
        "engine": {"threads": 1, "max_running": 8, "prefill_chunk": 64, "cache_tokens": 4096},
        "cache_dir": str(root / "cache"),
        "port_file": str(port_file),
    }
    (root / "engine.json").write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "openclaw_rl.engines.embedded", "--config", str(root / "engine.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not port_file.exists():
        assert process.poll() is None, "the engine died while starting"
        assert time.monotonic() < deadline, "the engine did not start"
        time.sleep(0.05)
    return process, json.loads(port_file.read_text())["url"]


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the engine, which is left unpaused and idle."""
    async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
        yield client
        await client.post("/continue_generation", json={})
        await client.post("/abort_request", json={"abort_all": True})


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    message: str


@pytest.fixture
def refusal(http: httpx.AsyncClient) -> Callable[[dict[str, Any]], Awaitable[Answer]]:
    """Ask `/generate` for what must be refused; what was said."""

    async def ask(body: dict[str, Any]) -> Answer:
        reply = await http.post("/generate", json=body)
        text = reply.text
        if reply.status_code != 200 or not body.get("stream"):
            return Answer(reply.status_code, text)
        first, *rest = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert rest == ["[DONE]"], "something was generated"
        error = json.loads(first)["error"]
        return Answer(error["code"], error["message"])

    return ask
