"""Decode speed of the embedded engine, beside plain `transformers.generate` on the same model.

    scripts/benchmarks.sh engine_speed [--rounds 5] [--new-tokens 128] [--out FILE.json]

Both sides hold the bundled model in fp32, use the same number of threads and sample at temperature 0.7; end tokens are
ignored. They alternate within one run, and each round gives its own ratio. The engine is the real process, called over
HTTP with streaming and log-probs. `generate` runs in this process and returns no log-probs. Prompts are new in every
round and of equal length: the prefix cache never helps, and a batch of `generate` has no padding.

Each case has two figures. *Whole request*: all tokens over the time from the request to the last token, prefill
included. *Decode alone*: tokens after every stream has its first, over the time they take. The second figure removes a
difference: the engine gives the first of eight replies before the last prompt is computed, a batch gives all at once.

Eight streams are compared with a batch of eight: the fair comparison, and the one that the aim of 3 × refers to. They
are compared with one call, too: the sum of eight streams over the rate of a single stream. The third comparison is with
eight single calls, one after the other.

Two figures are beside a limit of the machine, in the same rounds. *Share of bandwidth*: the bytes of weights, keys and
values that the decode steps read, over those that a copy of a large tensor moves in the same time. *Share of a matmul
chain*: the time of the model's linear layers alone on a prompt's tokens, over the time to the engine's first token.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from openclaw_rl.models.resolve import load_model, resolve
from openclaw_rl.settings import ModelSettings

TEMPERATURE = 0.7
_COPIED, _COPIES = 1 << 28, 5
_PREFILL_TOKENS = 2000
_SHARES = "shares of limits"
Prompt = list[int]


@dataclass(frozen=True)
class Timing:
    """One measurement of a case. Times are seconds; this process stamps each stream's tokens."""

    begin: float
    streams: list[list[float]]

    @property
    def whole(self) -> float:
        """Tokens a second, prefill included."""
        return sum(map(len, self.streams)) / (max(stamps[-1] for stamps in self.streams) - self.begin)

    @property
    def decode(self) -> float:
        """Tokens a second from the moment on when all streams have their first."""
        ready = max(stamps[0] for stamps in self.streams)
        after = sum(stamp > ready for stamps in self.streams for stamp in stamps)
        return after / (max(stamps[-1] for stamps in self.streams) - ready)


class Stamps(StoppingCriteria):
    """Stopping criterion that stamps the end of each step of `generate` and never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def generate(model: Any, prompts: list[Prompt], new_tokens: int) -> Timing:
    stamps, ids = Stamps(), torch.tensor(prompts)
    begin = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([stamps]),
        )
    assert output.shape[1] == len(prompts[0]) + new_tokens
    return Timing(begin, [stamps.times] * len(prompts))


async def stream(url: str, prompt: Prompt, new_tokens: int) -> list[float]:
    """Return the stamps of one reply's tokens."""
    # A plain socket: the load generator shares the cores with the engine.
    sampling = {"temperature": TEMPERATURE, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = json.dumps(
        {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "stream": True}
    ).encode()
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
    head = f"POST /generate HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    stamps: list[float] = []
    async with asyncio.timeout(600):
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                stamps += [time.perf_counter()] * _ids(line)
    writer.close()
    assert len(stamps) == new_tokens, f"{len(stamps)} tokens came, not {new_tokens}"
    return stamps


def _ids(event: bytes) -> int:
    """Return the number of tokens of an event, without parsing all of it."""
    begin = event.index(b'"output_ids":[') + len(b'"output_ids":[')
    return event.count(b",", begin, event.index(b"]", begin)) + 1


def engine(url: str, prompts: list[Prompt], new_tokens: int) -> Timing:
    async def run() -> list[list[float]]:
        return await asyncio.gather(*(stream(url, prompt, new_tokens) for prompt in prompts))

    begin = time.perf_counter()
    return Timing(begin, asyncio.run(run()))


def copied_per_s() -> float:
    """Return the bytes that a copy of a large tensor reads and writes in a second: the best of a few."""
    source = torch.zeros(_COPIED // 4)
    target = torch.empty_like(source)
    return max(2 * _COPIED / _seconds(lambda: target.copy_(source)) for _ in range(_COPIES))


def chain_s(model: Any, tokens: int) -> float:
    """Return the seconds of all linear layers of the model on `tokens` rows, without the head: the best of a few."""
    weights = [module.weight for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    rows = {weight.shape[1]: torch.randn(tokens, weight.shape[1]) for weight in weights}

    def chain() -> None:
        for weight in weights:
            torch.nn.functional.linear(rows[weight.shape[1]], weight)

    with torch.inference_mode():
        return min(_seconds(chain) for _ in range(_COPIES))


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def step_bytes(model: Any, streams: int, tokens: float) -> float:
    """Return the bytes of weights, and of the sequences' keys and values, that a step reads."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return 4.0 * (sum(weight.numel() for weight in model.parameters()) + kv * streams * tokens)


def one_by_one(model: Any, prompts: list[Prompt], new_tokens: int) -> Timing:
    begin = time.perf_counter()
    timings = [generate(model, [prompt], new_tokens) for prompt in prompts]
    return Timing(begin, [timing.streams[0] for timing in timings])


class Engine:
    """The real engine process, on a free port."""

    def __init__(self, folder: Path, cache: Path, threads: int) -> None:
        port_file = folder / "engine.json"
        argv = [sys.executable, "-m", "openclaw_rl.engines.embedded", "--threads", str(threads), "--cache", str(cache)]
        self.log = (folder / "engine.log").open("wb")
        self.process = subprocess.Popen([*argv, "--port-file", str(port_file)], stdout=self.log, stderr=self.log)
        while not port_file.exists():
            assert self.process.poll() is None, (folder / "engine.log").read_text()
            time.sleep(0.1)
        self.url: str = json.loads(port_file.read_text())["url"]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


def measure(model: Any, url: str, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the measurements of each case, one entry a round."""
    numbers = random.Random(0)

    def prompts(count: int, tokens: int = options.prompt_tokens) -> list[Prompt]:
        return [[numbers.randrange(1000, 40000) for _ in range(tokens)] for _ in range(count)]

    n = options.new_tokens
    cases = {
        "generate, 1": lambda: generate(model, prompts(1), n),
        "engine, 1": lambda: engine(url, prompts(1), n),
        f"generate, batch of {options.streams}": lambda: generate(model, prompts(options.streams), n),
        f"engine, {options.streams} streams": lambda: engine(url, prompts(options.streams), n),
        f"generate, {options.streams} one by one": lambda: one_by_one(model, prompts(options.streams), n),
    }
    generate(model, prompts(1), 8)  # first calls page weights in and pack them
    engine(url, prompts(1), 8)
    engine(url, prompts(options.streams), 8)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(options.rounds):
        for name, run in cases.items():
            if name.endswith("one by one") and number >= options.slow_rounds:
                continue
            spent = time.process_time()
            timing = run()
            entry = {"decode": timing.decode, "whole": timing.whole, "own_cpu_s": time.process_time() - spent}
            if name.endswith("one by one"):
                del entry["decode"]  # the streams do not overlap: no figure
            found[name].append(entry)
            figures = ", ".join(f"{key} {value:.1f} tokens/s" for key, value in entry.items() if key != "own_cpu_s")
            print(f"round {number + 1}/{options.rounds}  {name:26} {figures}", flush=True)
        found.setdefault(_SHARES, []).append(shares(model, url, found, options, prompts))
        print(f"round {number + 1}/{options.rounds}  {found[_SHARES][-1]}", flush=True)
    return found


def shares(
    model: Any,
    url: str,
    found: dict[str, list[dict[str, float]]],
    options: argparse.Namespace,
    prompts: Callable[..., list[Prompt]],
) -> dict[str, float]:
    """Return the shares of the machine's limits that the newest round reached."""
    moved = copied_per_s()
    tokens = options.prompt_tokens + options.new_tokens / 2
    reached = {}
    for streams, name in ((1, "engine, 1"), (options.streams, f"engine, {options.streams} streams")):
        steps_per_s = found[name][-1]["decode"] / streams
        reached[f"bandwidth, {streams} streams"] = steps_per_s * step_bytes(model, streams, tokens) / moved
    prefill = engine(url, prompts(1, _PREFILL_TOKENS), 1)
    first_s = prefill.streams[0][0] - prefill.begin
    reached["matmul chain, prefill"] = chain_s(model, _PREFILL_TOKENS) / first_s
    return {name: round(value, 3) for name, value in reached.items()} | {"copied GB/s": round(moved / 1e9, 1)}


def ratios(found: dict[str, list[dict[str, float]]], ours: str, theirs: str, figure: str) -> dict[str, float]:
    """Return our rate over theirs, round by round."""
    pairs = [(a[figure], b[figure]) for a, b in zip(found[ours], found[theirs], strict=False)]
    each = [a / b for a, b in pairs]
    return {"median": round(median(each), 2), "least": round(min(each), 2), "most": round(max(each), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow-rounds", type=int, default=1, help="rounds of single calls one by one (default: 1)")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="threads of both sides (default: all cores)"
    )
    parser.add_argument("--cache", type=Path, help="folder of converted models (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "engine_speed.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        cache = options.cache or Path(scratch) / "cache"
        model = load_model(resolve(ModelSettings(), cache))
        process = Engine(Path(scratch), cache, options.threads)
        try:
            found = measure(model, process.url, options)
        finally:
            process.stop()
    one, many = "engine, 1", f"engine, {options.streams} streams"
    batch, slow = f"generate, batch of {options.streams}", f"generate, {options.streams} one by one"
    result = {
        "conditions": {
            "threads": options.threads,
            "cores": os.cpu_count(),
            "prompt tokens": options.prompt_tokens,
            "new tokens": options.new_tokens,
            "rounds": options.rounds,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "tokens a second, median": {
            name: {
                figure: round(median(entry[figure] for entry in entries), 1)
                for figure in ("decode", "whole")
                if figure in entries[0]
            }
            for name, entries in found.items()
            if name != _SHARES
        },
        "shares of limits, median, least, most": {
            name: [median(each), min(each), max(each)]
            for name in found[_SHARES][0]
            for each in [[entry[name] for entry in found[_SHARES]]]
        },
        "ratios": {
            "1 stream, decode alone [aim 2]": ratios(found, one, "generate, 1", "decode"),
            "1 stream, whole request": ratios(found, one, "generate, 1", "whole"),
            f"{options.streams} streams over a batch, decode alone [aim 3]": ratios(found, many, batch, "decode"),
            f"{options.streams} streams over a batch, whole request": ratios(found, many, batch, "whole"),
            f"{options.streams} streams in sum over one call, decode alone": ratios(
                found, many, "generate, 1", "decode"
            ),
            f"{options.streams} streams over single calls, whole request": ratios(found, many, slow, "whole"),
        },
        "CPU s of the load generator in a run of all streams": round(
            median(entry["own_cpu_s"] for entry in found[many]), 3
        ),
    }
    print(json.dumps(result, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
