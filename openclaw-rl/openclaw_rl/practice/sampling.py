"""Sampling of practice replies: the current policy, the prompt of a turn, the turn's own sampling parameters.

Nothing is parsed for a client, and no tool runs: a reply that ends in a tool call is text like any other. The engine
gives way to chats (priority), and leaving a call aborts it.
"""

import asyncio
import math
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.base import PRIORITY_BACKGROUND, Engine
from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.engines.pictures import Album
from openclaw_rl.errors import AlignmentError
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Render
from openclaw_rl.proxy.generation import Decoding, Generation
from openclaw_rl.types import Ids, JudgedTurn, NextState, Request, SamplingParams, Scope, Turn


class Decoder(Protocol):
    """Members of the front end that practice uses."""

    @property
    def end_ids(self) -> Collection[int]: ...

    vocab_size: int

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class ReplySampler:
    engine: Engine
    serving: VersionAdmission
    frontend: Decoder
    render: Render
    context_length: int
    max_tokens: int
    """Longest practice reply."""
    sampling: SamplingParams
    """Sampling of built-in prompts."""
    clock: Callable[[], float]
    """The ledger's clock."""
    album: Album | None = None
    """Pictures of prompts; None: a prompt with pictures is none to practise on."""

    def is_fit(self, request: Request) -> bool:
        """Return True if the prompt can be answered anew, exactly as it was asked."""
        s = request.sampling
        if request.pictures and self.album is None:
            return False
        # A stop string cuts the reply's text, which nobody parses here.
        return bool(request.prompt_ids) and s.is_trainable and not s.stop and self._room(request.prompt_ids) > 0

    async def built_in(self, text: str, owner: tuple[str, str]) -> Request:
        """Return the request of a built-in prompt."""
        messages = (Message(role="user", content=text),)
        ids = await asyncio.to_thread(self.render, messages, None, None)
        scope = Scope(owner[0], None, owner[1])
        return Request("", scope, self.clock(), messages, None, None, ids, self.sampling)

    async def reply(self, request: Request) -> JudgedTurn | None:
        """Sample a new reply to this prompt. None: its tokens cannot be trained on.

        Raises EngineRefused, RequestError.
        """
        name = f"practice-{uuid.uuid4().hex}"
        longest = min(request.sampling.max_new_tokens, self.max_tokens, self._room(request.prompt_ids))
        # Another seed than the user's: the same reply again would teach nothing.
        sampling = replace(request.sampling, max_new_tokens=longest, seed=None)
        asked = replace(request, request_id=name, received_at=self.clock(), sampling=sampling)
        try:
            shown = None if self.album is None else await self.album.shown(asked.prompt_ids)
        except AlignmentError:  # a picture was forgotten
            return None
        generation = Generation(
            self.engine,
            self.serving,
            rid=name,
            prompt_ids=asked.prompt_ids,
            decoding=Decoding(
                sampling,
                self.frontend.end_ids,
                user=request.scope.user,
                policy=request.scope.policy,
                opens=False,
                pictures=shown,
            ),
            priority=PRIORITY_BACKGROUND,
        )
        async with generation:
            async with aclosing(generation.events()) as events:
                async for _ in events:
                    pass
        sampled = generation.sampled
        is_sound = sampled.ids and sampled.is_aligned and all(map(math.isfinite, sampled.log_probs))
        if not is_sound or max(sampled.ids) >= self.frontend.vocab_size or len(sampled.versions) != 1:
            return None
        turn = Turn(
            turn_id=name,
            request_id=name,
            finished_at=self.clock(),
            response_ids=tuple(sampled.ids),
            rollout_log_probs=tuple(sampled.log_probs),
            loss_mask=(True,) * len(sampled.ids),
            versions=sampled.versions,
            finish_reason=sampled.finish or "stop",
            reply=Message(role="assistant", content=self.frontend.decode(sampled.ids)),
            cached_tokens=sampled.cached_tokens,
        )
        return JudgedTurn(asked, turn, NextState(()))

    def _room(self, prompt: Ids) -> int:
        return self.context_length - len(prompt) - 1 if self.context_length else self.max_tokens


async def base_reply(
    engine: Engine,
    prompt: Ids,
    *,
    end_ids: Collection[int],
    max_tokens: int,
    temperature: float,
    seed: int,
    album: Album | None = None,
) -> Ids:
    """Return a reply of the base. The same seed gives the same reply again, also after a restart.

    Raises AlignmentError if a picture of the prompt is missing.
    """
    shown = None if album is None else await album.shown(prompt)
    request = GenerateRequest(
        input_ids=list(prompt if shown is None else shown.ids),
        image_data=None if shown is None else shown.image_data,
        sampling_params=EngineSampling(
            max_new_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=sorted(end_ids) or None,
            sampling_seed=seed,
            skip_special_tokens=False,
        ),
        rid=f"measure-{uuid.uuid4().hex}",
        return_logprob=True,
        lora_path=None,
        extra_key="v0",
        priority=PRIORITY_BACKGROUND,
    )
    return tuple((await engine.generate(request)).output_ids)
