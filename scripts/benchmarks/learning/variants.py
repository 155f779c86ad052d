"""Variants of corrected prompts, as the server's practice writes them (`openclaw_rl.practice.variants`).

The base is frozen, so what it writes behind an opening does not depend on the run: a process writes a pool once, and
runs take from it in turn.
"""

import zlib
from functools import cache

from benchmarks.learning.engine import ForwardEngine
from benchmarks.learning.fleet import Fleet, Reply
from benchmarks.learning.simulation import Asked
from benchmarks.learning.subject import Subject
from openclaw_rl.engines.dialect import FinishReason, GenerateReply, GenerateRequest, MetaInfo
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Render
from openclaw_rl.offline.personas import Topic, words_of
from openclaw_rl.practice.variants import Variants
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.types import Ids, Request, SamplingParams, Scope

POOL = 32
"""Texts behind one opening."""
_STEM, _LEAST_LETTERS = 5, 4


class Writer:
    """Writes variants of the prompts of one run."""

    def __init__(self, subject: Subject, engine: ForwardEngine, render: Render) -> None:
        self._subject, self._engine, self._render = subject, engine, render
        self._taken: dict[Ids, int] = {}
        self._variants = Variants(self, self, render, subject.encode)  # type: ignore[arg-type]
        self.score = engine.score

    async def of(self, asked: Asked, words: str) -> Asked | None:
        """Return a question that begins like this one, with the topic that a reply must be about; or None."""
        roles = ("user", "assistant")
        messages = tuple(Message(role=roles[n % 2], content=text) for n, text in enumerate(asked.messages))
        prompt = self._render(messages, None, None)
        request = Request("", Scope("user", None), 0.0, messages, None, None, prompt, SamplingParams(1))
        varied = await self._variants.of(asked.messages[-1], request, words)
        if varied is None:
            return None
        text = varied.messages[-1].text()
        known = set(words_of(asked.messages[-1]))
        about = tuple(word[:_STEM] for word in words_of(text) if len(word) >= _LEAST_LETTERS and word not in known)
        return Asked(Topic(text, about), (*asked.messages[:-1], text)) if about else None

    # The engine and the front end that `Variants` uses.

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset({self._subject.end_id})

    def decode(self, ids: Ids) -> str:
        return str(self._subject.tokenizer.decode(list(ids), skip_special_tokens=True))

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        prompt, sampling = tuple(request.input_ids), request.sampling_params
        pool = _written(self._subject, prompt, sampling.max_new_tokens, sampling.temperature)
        place = self._taken[prompt] = self._taken.get(prompt, -1) + 1
        ids = pool[place % POOL].ids
        ended = FinishReason(type="stop" if ids[-1] == self._subject.end_id else "length")
        return GenerateReply(output_ids=list(ids), meta_info=MetaInfo(finish_reason=ended))


@cache
def _base(subject: Subject) -> Fleet:
    """Return a sampler of the base: a new policy is the base."""
    return Fleet([subject.new_policy(TrainerSettings(device=subject.device))], subject.end_id)


@cache
def _written(subject: Subject, prompt: Ids, tokens: int, temperature: float) -> list[Reply]:
    seed = zlib.crc32(repr(prompt).encode()) >> 1
    return _base(subject).generate([[prompt] * POOL], tokens, temperature, [seed])[0]
