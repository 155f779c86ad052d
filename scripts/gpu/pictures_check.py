"""Exactness of prompts with pictures: an engine's log-probs beside the trainer's, on one model and the same pictures.

    python -m gpu.pictures_check make FOLDER             a random Qwen3-VL with heads of 128 (0.3 GB)
    python -m gpu.pictures_check serve FOLDER --python P [--flags='FLAG …']   print SGLang's command that serves it
    python -m gpu.pictures_check run FOLDER --engine-url URL [--device cuda] [--dtype bfloat16]

`run` asks about PNG, JPEG and WebP pictures, several in one prompt, and texts without any; under the base and under an
adapter of noise that it makes. It compares each reply's log-probs with the trainer's own forward pass. It prints its
figures as JSON, and exits with 1 for a finding:

* a prompt that the engine counts otherwise than our front end;
* pictures that cost more than the texts' noise (twice it, and 0.02 nats a token at least);
* an adapter that the engine applies otherwise than the trainer;
* a reply that the engine does not score behind its pictures, as the gate and teachers ask it to;
* replies that do not depend on their picture.
"""

import argparse
import asyncio
import hashlib
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image

from gpu.vision_model import CARD, TINY, vision_model
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.engines.pictures import Album, PicturePrompt, PictureUrls
from openclaw_rl.engines.sglang import launch
from openclaw_rl.errors import AlignmentError, EngineError
from openclaw_rl.messages import Message
from openclaw_rl.models.resolve import ResolvedModel
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.proxy.pictures import PictureReader
from openclaw_rl.settings import EngineSettings, ModelSettings, PictureSettings, TrainerSettings
from openclaw_rl.trainer_protocol import GAP_ALERT
from openclaw_rl.trainers import base_model
from openclaw_rl.trainers.batches import rows_of
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Sample, VersionRun, WeightKind
from openclaw_rl.types.pictures import Picture, with_pictures

ADAPTER = "noise"
LEAST_NOISE = 0.02
"""Nats a token that pictures may cost, whatever the texts' noise is."""
LEAST_SHIFT = 0.05
"""Nats a token by which another picture, or the adapter, must change a reply."""
TRIES = 5
"""Calls until a reply begins with a token that is no place of a picture."""
_KINDS = (("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp"))


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and the reply of the engine."""

    name: str
    sample: Sample
    pictures: tuple[Picture, ...]
    counted: int
    """Tokens of the prompt as the engine counts them."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make")
    make.add_argument("folder", type=Path)
    make.add_argument("--tiny", action="store_true", help="of a size for a CPU")
    serve = commands.add_parser("serve")
    serve.add_argument("folder", type=Path)
    serve.add_argument("--python", default=sys.executable, help="interpreter of SGLang's environment")
    serve.add_argument("--port", type=int, default=30000)
    serve.add_argument("--flags", default="", metavar="'FLAG …'", help="more flags of SGLang's server")
    run = commands.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("--engine-url", required=True)
    run.add_argument("--device", default="cuda")
    run.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    run.add_argument("--tokens", type=int, default=32, help="of each reply")
    options = parser.parse_args()
    if options.command == "make":
        vision_model(options.folder, TINY if options.tiny else CARD)
        return 0
    if options.command == "serve":
        print(" ".join(_serve(options.folder, options.python, options.port, shlex.split(options.flags))))
        return 0
    figures = asyncio.run(check(options.folder, options.engine_url, options.device, options.dtype, options.tokens))
    print(json.dumps(figures, indent=1))
    return 1 if figures["findings"] else 0


def _serve(folder: Path, python: str, port: int, flags: Sequence[str] = ()) -> list[str]:
    trainer = TrainerSettings()
    words = launch.argv(
        launch.look(python),
        EngineSettings(kind="sglang", python=python, args=tuple(flags)),
        folder=folder,
        name="pictures",
        port=port,
        context_length=None,
        adapters=launch.Adapters(trainer.rank, trainer.target_modules, 4),
    )
    environ = [f"{name}={value}" for name, value in launch.ENVIRON.items()]
    return ["env", *environ, python, "-I", "-m", launch.MODULE, *words]


async def check(folder: Path, url: str, device: str, dtype: str, tokens: int) -> dict[str, object]:
    """Ask the engine, and compare its numbers with the trainer's."""
    frontend = FrontEnd(ModelSettings(path=str(folder)), folder)
    settings = TrainerSettings.model_validate({"device": device, "dtype": dtype, "max_tokens": 8192})
    with tempfile.TemporaryDirectory() as work:
        pictures = Path(work) / "pictures"
        pictures.mkdir()
        resolved = ResolvedModel("pictures", folder, Path(work) / "hash")
        policy = base_model.make_policy(WeightKind.LORA, resolved, settings, pictures)
        assert isinstance(policy, LoraPolicy)
        policy.reset(0)
        engine = HttpEngine(url, settings=EngineSettings(kind="url", url=url))
        if frontend.vision is not None:
            engine.show(Album(pictures, frontend.vision.placeholder))
        try:
            base = [await _ask(engine, frontend, prompt, tokens, pictures) for prompt in _prompts()]
            scores = {one.name: await _scored(engine, policy, one) for one in base if one.pictures}
            gaps = {one.name: _gap(policy, one.sample) for one in base}
            other = _other_picture(policy, base, pictures)
            adapter = Path(work) / "adapter"
            adapter.mkdir()
            _add_noise(policy)
            shift = _mean([_gap(policy, one.sample) for one in base if one.pictures])
            policy.save(adapter)
            await engine.load_adapter(ADAPTER, adapter)
            adapted = [await _ask(engine, frontend, prompt, tokens, pictures, ADAPTER) for prompt in _prompts()]
            await engine.unload_adapter(ADAPTER)
        finally:
            await engine.aclose()
        under_adapter = {one.name: _gap(policy, one.sample) for one in adapted}
    asked = [*base, *adapted]
    figures: dict[str, object] = {
        "gaps": gaps,
        "gaps_under_adapter": under_adapter,
        "scores": scores,
        "other_picture": other,
        "adapter_shift": shift,
        "prompt_tokens": {one.name: [len(one.sample.prompt_ids), one.counted] for one in base},
    }
    figures["findings"] = [
        *(
            f"{one.name}: {one.counted} tokens of prompt, not {len(one.sample.prompt_ids)}"
            for one in asked
            if one.counted != len(one.sample.prompt_ids)
        ),
        *_noisy(base, gaps, under_adapter),
        *_unscored(base, gaps, scores),
        *([] if other > LEAST_SHIFT else [f"another picture changes a reply by {other:.3g} nats a token"]),
        *([] if shift > LEAST_SHIFT else [f"the adapter changes a reply by {shift:.3g} nats a token"]),
    ]
    return figures


def _noisy(asked: Sequence[Asked], base: dict[str, float], adapted: dict[str, float]) -> list[str]:
    """Return a finding for each part that differs by more than the noise of the base's texts explains."""
    texts, seen = ([one.name for one in asked if bool(one.pictures) is has] for has in (False, True))
    noise = _mean([base[name] for name in texts])
    most = max(2 * noise, LEAST_NOISE)
    parts = {
        "pictures": [base[name] for name in seen],
        "texts under an adapter": [adapted[name] for name in texts],
        "pictures under an adapter": [adapted[name] for name in seen],
    }
    found = [] if noise <= GAP_ALERT else [f"texts: engine and trainer differ by {noise:.3g} nats a token"]
    return found + [
        f"{what}: engine and trainer differ by {gap:.3g} nats a token, on texts by {noise:.3g}"
        for what, gaps in parts.items()
        if not (gap := _mean(gaps)) <= most
    ]


def _unscored(asked: Sequence[Asked], gaps: dict[str, float], scores: dict[str, float | str]) -> list[str]:
    """Return a finding for each score of a prompt with pictures that failed, or differs by more than texts' noise."""
    most = max(2 * _mean([gaps[one.name] for one in asked if not one.pictures]), LEAST_NOISE)
    faults = [f"{name}: no score of the reply: {found}" for name, found in scores.items() if isinstance(found, str)]
    gap = _mean([found for found in scores.values() if not isinstance(found, str)])
    return faults if gap <= most else [*faults, f"scores with pictures: engine and trainer differ by {gap:.3g} nats"]


def _prompts() -> list[tuple[str, Message]]:
    """Return the prompts by name: each kind of file, several pictures, a long text, and none."""
    found = []
    for number, (kind, media) in enumerate(_KINDS):
        for size in ((320, 240), (611, 1023)):
            url = _data_url(kind, media, *size, shade=40 * number)
            found.append((f"{kind} {size[0]}x{size[1]}", [_text("What is in this picture? "), _picture(url)]))
    several = [_picture(_data_url("PNG", "image/png", 200 + 64 * n, 300, shade=60 * n)) for n in range(3)]
    found.append(("three pictures", [_text("Compare "), *several, _text(" with each other. " * 20)]))
    found += [(f"text {n}", [_text(f"Tell me of the number {n}. " * (1 + 20 * n))]) for n in range(4)]
    return [(name, Message.model_validate({"role": "user", "content": parts})) for name, parts in found]


def _text(said: str) -> dict[str, object]:
    return {"type": "text", "text": said}


def _picture(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def _data_url(kind: str, media: str, width: int, height: int, *, shade: int) -> str:
    from base64 import b64encode

    waves = torch.arange(width)[None, :, None] * torch.tensor([3, 5, 7]) + torch.arange(height)[:, None, None] * 2
    pixels = ((waves + shade) % 256).to(torch.uint8).numpy()
    out = BytesIO()
    Image.fromarray(pixels, "RGB").save(out, kind)
    return f"data:{media};base64,{b64encode(out.getvalue()).decode()}"


async def _ask(
    engine: HttpEngine,
    frontend: FrontEnd,
    prompt: tuple[str, Message],
    tokens: int,
    folder: Path,
    lora_path: str | None = None,
) -> Asked:
    """Ask as the proxy does, and keep the pictures as the ledger does."""
    name, said = prompt
    reader = PictureReader(PictureSettings(enabled=True), None)
    read = reader.headers([said])
    rendered = frontend.render(read.messages, shows_pictures=True)
    pictures = tuple(read.pictures[picture.digest] for picture in rendered.pictures)
    for picture in pictures:
        (folder / picture.digest).write_bytes(picture.data or b"")
    ids, images = list(rendered.ids), None
    if pictures and frontend.vision is not None:
        shown = PicturePrompt.of(rendered.ids, PictureUrls(pictures, reader.memory), frontend.vision.placeholder)
        ids, images = list(shown.ids), shown.image_data
    request = GenerateRequest(
        input_ids=ids,
        image_data=images,
        sampling_params=EngineSampling(max_new_tokens=tokens, temperature=1.0, ignore_eos=True),
        return_logprob=True,
        lora_path=lora_path,
    )
    for _ in range(TRIES):
        reply = await engine.generate(request)
        if count := _readable(reply.output_ids, frontend):
            break
    log_probs = [entry[0] for entry in reply.meta_info.output_token_logprobs or ()]
    values = tuple(math.nan if value is None else value for value in log_probs)
    sample = Sample(
        sample_id=name,
        prompt_ids=tuple(rendered.ids),
        response_ids=tuple(reply.output_ids[:count]),
        loss_mask=(True,) * count,
        rollout_log_probs=values[:count],
        versions=(VersionRun(0, count),),
        temperature=1.0,
        pictures=tuple(picture.digest for picture in pictures),
    )
    return Asked(name, sample, pictures, reply.meta_info.prompt_tokens)


def _readable(ids: Sequence[int], frontend: FrontEnd) -> int:
    """Return the number of ids before the first place of a picture or a video.

    Random weights sample such places now and then. Without a picture there no pass can read on, and the server takes
    such a reply for no sample.
    """
    reserved = frozenset[int]() if frontend.vision is None else frontend.vision.reserved
    return next((at for at, token in enumerate(ids) if token in reserved), len(ids))


async def _scored(engine: HttpEngine, policy: LoraPolicy, one: Asked) -> float | str:
    """Let the engine score the reply as the gate and teachers do. Return the distance from the trainer, or a fault."""
    sample = one.sample
    prompt = with_pictures(sample.prompt_ids, one.pictures)
    try:
        score = await engine.score(prompt, sample.response_ids, lora_path=None, extra_key=None)
    except (EngineError, AlignmentError) as error:
        return str(error)
    return _gap(policy, replace(sample, rollout_log_probs=score.log_probs))


@torch.no_grad()
def _gap(policy: LoraPolicy, sample: Sample) -> float:
    """Return the mean distance of the engine's log-probs from the trainer's, in nats a token."""
    (batch,) = policy.cut(rows_of([sample]), 8192)
    ours = policy.log_probs(batch)[0].float().cpu()
    return float((ours - torch.tensor(sample.rollout_log_probs)).abs().mean())


def _other_picture(policy: LoraPolicy, asked: Sequence[Asked], folder: Path) -> float:
    """Return the mean distance when the trainer sees white pictures of the same sizes: pictures must matter."""
    gaps = []
    for one in asked:
        if len(one.pictures) == 1:
            seen = one.pictures[0]
            out = BytesIO()
            Image.new("RGB", (seen.width, seen.height), "white").save(out, "PNG")
            digest = hashlib.sha256(out.getvalue()).hexdigest()
            (folder / digest).write_bytes(out.getvalue())
            gaps.append(_gap(policy, replace(one.sample, pictures=(digest,))))
    return _mean(gaps)


def _add_noise(policy: LoraPolicy) -> None:
    """Make the adapter one of noise."""
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=dice) * 0.05)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


if __name__ == "__main__":
    sys.exit(main())
