"""Sample the tokens of one reply, in as many engine calls as it takes.

If the engine breaks a reply off (it crashed, or a weight swap aborted it), `Generation` asks again with the prompt and
the tokens so far. It keeps the version while the engine has it, else it takes the current one. Each token keeps the
version that sampled it. A reply that had ended, or had no tokens left, is not asked for again. After `hold_s` seconds
without progress `Generation` raises `RequestError` 503. Closing the iterator aborts the engine's request.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

import structlog

from openclaw_rl.backoff import Backoff
from openclaw_rl.engines.admission import VersionAdmission, VersionUse, is_unknown_adapter
from openclaw_rl.engines.base import PRIORITY_CHAT, PRIORITY_EPISODE, Engine
from openclaw_rl.engines.dialect import (
    LARGEST_ID,
    EngineSampling,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    TokenLogProb,
    storable,
)
from openclaw_rl.engines.event_stream import MOST_WORDS
from openclaw_rl.engines.pictures import PicturePrompt
from openclaw_rl.errors import EngineGone, EngineLeft, EngineRefused, RequestError
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import KEYLESS_USER, SHARED_POLICY, Ids, Request, SamplingParams, VersionRun

log = structlog.get_logger()

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class EngineExtras:
    """Requests of a client to the engine beyond the sampling parameters."""

    json_schema: str | None = None
    logit_bias: dict[int, float] | None = None
    top_logprobs: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Decoding:
    """Sampling parameters, end tokens and extras of one reply: how the engine decodes it, and when it is complete."""

    sampling: SamplingParams
    end_ids: Collection[int]
    """Tokens after which the reply is complete."""
    extras: EngineExtras = EngineExtras()
    user: str = KEYLESS_USER
    """The user whose prefix cache the calls use."""
    policy: str = SHARED_POLICY
    """The policy that must answer."""
    opens: bool = True
    """The policy is opened if it is new; False for a reply that no user asked for."""
    conversation: str | None = None
    """Name of the conversation: a pool keeps it on the engine that holds its prefix."""
    pictures: PicturePrompt | None = None
    """The prompt as the engine gets it, where it has pictures."""

    @classmethod
    def of(
        cls, request: Request, end_ids: Collection[int], extras: EngineExtras, shown: PicturePrompt | None = None
    ) -> "Decoding":
        scope = request.scope
        conversation = _conversation(request)
        return cls(
            request.sampling, end_ids, extras, scope.user, scope.policy, conversation=conversation, pictures=shown
        )

    @property
    def is_not_resumable(self) -> bool:
        """True if the engine keeps state for the reply that a resumed call would not have."""
        s = self.sampling
        penalties = (s.frequency_penalty, s.presence_penalty, s.repetition_penalty - 1)
        return s.seed is not None or any(penalties) or self.extras.json_schema is not None

    def for_engine(self, tokens_done: int) -> EngineSampling:
        """Return the sampling parameters of an engine call after `tokens_done` tokens."""
        s, extras = self.sampling, self.extras
        sampling = EngineSampling(
            max_new_tokens=s.max_new_tokens - tokens_done,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            frequency_penalty=s.frequency_penalty,
            presence_penalty=s.presence_penalty,
            repetition_penalty=s.repetition_penalty,
            stop_token_ids=sorted(self.end_ids) or None,
            ignore_eos=extras.ignore_eos,
            sampling_seed=s.seed,
            skip_special_tokens=False,
            json_schema=None if tokens_done else extras.json_schema,  # a grammar cannot start in the middle
        )
        if extras.logit_bias:
            bias = {str(token): value for token, value in extras.logit_bias.items()}
            sampling = sampling.model_copy(update={"logit_bias": bias})
        return sampling

    def finish_of(self, ids: Sequence[int]) -> str | None:
        """Return `stop` or `length` if these tokens are a complete reply, else None."""
        if ids and ids[-1] in self.end_ids and not self.extras.ignore_eos:
            return "stop"
        return "length" if len(ids) >= self.sampling.max_new_tokens else None


@dataclass(slots=True)
class Sampled:
    """Tokens of the reply so far, exactly as sampled."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """NaN where the engine gave no log-prob."""
    top: list[list[TokenLogProb] | None] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    """[weight_version, length] pairs."""
    cached_tokens: int = 0
    finish: str | None = None
    """`stop` or `length`."""
    is_aligned: bool = True
    """Every id came with its own log-prob."""
    resumed: int = 0
    """Engine calls after the first."""
    is_joined: bool = False
    """The reply was cut after its first token, and resumed."""

    @property
    def versions(self) -> tuple[VersionRun, ...]:
        return tuple(VersionRun(version, length) for version, length in self.runs)


class Generation:
    """The engine calls of one reply. `async with` releases the version at its end; iterate `events()` once."""

    def __init__(
        self,
        engine: Engine,
        serving: VersionAdmission,
        *,
        rid: str,
        prompt_ids: Ids,
        decoding: Decoding,
        only_version: int | None = None,
        health: Health | None = None,
        priority: int = PRIORITY_CHAT,
    ) -> None:
        """only_version: the version that must start the reply, because the client named it; a cut reply may resume
        under another one. health: gets each success and failure of the engine. priority: of a practice reply, lower
        than a chat's."""
        self._engine, self._serving = engine, serving
        self._rid, self._prompt_ids, self._decoding, self._priority = rid, prompt_ids, decoding, priority
        self._top_logprobs = decoding.extras.top_logprobs
        self._only_version = only_version
        self._health = health or Health()
        self._stack = AsyncExitStack()
        self._use: VersionUse | None = None
        self._lost_adapter = False
        self._asked = 0
        """Tokens of the present call's prompt, as they are recorded."""
        self.sampled = Sampled()
        self.show: Callable[[], None] | None = None
        """Is called in the moment in which `sampled` gets one more token, in place of an event of `events`. It may be
        set from the first event on."""

    @property
    def weight_version(self) -> int | None:
        """The version that samples now; None while the admission holds the request."""
        return None if self._use is None else self._use.weight_version

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def events(self) -> AsyncGenerator[int, None]:
        """Yield the number of new tokens in `sampled`, per engine event. Raises EngineRefused, RequestError."""
        sampled = self.sampled
        pauses, attempt, progress = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), 0, 0
        loop = asyncio.get_running_loop()
        # `give_up_at` bounds all waiting without a new token together: pauses, and each wait at the admission.
        give_up_at = math.inf if self._serving.is_open else loop.time() + self._serving.hold_s
        await self._take_version()
        if self._only_version not in (None, self.weight_version):  # switched while it waited
            raise RequestError(
                f"version {self._only_version} is served no longer", status=404, code="model_not_found", param="model"
            )
        while True:
            attempt += 1
            try:
                async with aclosing(self._engine.stream(self._request(attempt), self._tap)) as replies:
                    async for reply in replies:
                        if reply.output_ids:
                            yield self._record(reply)
                        finish = reply.meta_info.finish_reason
                        if finish is not None and self._is_end(finish):
                            self._health.ok("engine")
                            return
            except EngineRefused as error:
                if sampled.resumed and await self._leave_lost_version():
                    continue
                if not self._has_lost_adapter(error):
                    raise
                # The engine restarted between two health checks: hold all chats until its adapters are loaded again.
                self._serving.hold()
            except EngineGone as error:
                # At debug: `EngineReadiness` and `Health` log one line for all requests.
                log.debug("engine_cut", rid=self._rid, tokens=len(sampled.ids), error=str(error))
                self._health.count("engine_cut")
                # Else the engine is known to be down, or is a problem of its own beside others that serve.
                if self._serving.is_open and not isinstance(error, EngineLeft):
                    self._health.failed("engine", str(error))
            sampled.finish = self._decoding.finish_of(sampled.ids)
            if sampled.finish is not None:  # the cut came after the last token
                return
            if len(sampled.ids) > progress or give_up_at == math.inf:
                progress = len(sampled.ids)
                pauses.reset()
                give_up_at = loop.time() + self._serving.hold_s
            elif loop.time() >= give_up_at:
                raise RequestError("the engine is not available; try again", status=503, code="engine_unavailable")
            sampled.resumed += 1
            sampled.is_joined |= bool(sampled.ids)
            with self._serving.parked():
                await asyncio.sleep(min(pauses.next_s(), give_up_at - loop.time()))
                await self._serving.wait_open(give_up_at - loop.time())
            if self._use is not None and not self._serving.still_serves(self._use):
                await self._take_version(give_up_at - loop.time())

    def _request(self, attempt: int) -> GenerateRequest:
        assert self._use is not None
        done, shown = self.sampled.ids, self._decoding.pictures
        self._asked = len(self._prompt_ids) + len(done)
        # Without validation, which would look at each of the ids.
        return GenerateRequest.model_construct(
            input_ids=[*(self._prompt_ids if shown is None else shown.ids), *done],
            image_data=None if shown is None else shown.image_data,
            sampling_params=self._decoding.for_engine(len(done)),
            # A prefix, no suffix: SGLang aborts every request whose id begins with the given one.
            rid=self._rid if attempt == 1 else f"{attempt}-{self._rid}",
            stream=True,
            return_logprob=True,
            top_logprobs_num=self._top_logprobs,
            lora_path=self._use.lora_path,
            affinity=self._decoding.conversation,
            extra_key=self._use.cache_of(self._decoding.user),
            priority=self._priority,
        )

    def _tap(self, reply: GenerateReply) -> bool:
        ids, entries, show = reply.output_ids, reply.meta_info.output_token_logprobs, self.show
        if show is None or len(ids) != 1 or entries is None or len(entries) != 1:
            return False
        if self._decoding.pictures is not None:
            return False  # `events` compares the prompt
        log_prob, token, _ = entries[0]
        if token != ids[0] or not 0 <= token <= LARGEST_ID or self._top_logprobs:
            return False  # `events` looks closer
        # As `_record`, for the usual event: one more token of the version that sampled the one before.
        self.sampled.ids.append(token)
        self.sampled.log_probs.append(storable(log_prob))
        self.sampled.runs[-1][1] += 1
        show()
        return True

    def _record(self, reply: GenerateReply) -> int:
        sampled, ids, meta = self.sampled, reply.output_ids, reply.meta_info
        # `Reply` checks ids against the model's own vocabulary; such an id does not end the chat.
        if min(ids) < 0 or max(ids) > LARGEST_ID:
            raise EngineGone("the engine sent ids that are no token ids")
        entries = meta.output_token_logprobs or []
        if len(entries) == len(ids) and all(entry[1] == token for entry, token in zip(entries, ids, strict=True)):
            sampled.log_probs += [storable(entry[0]) for entry in entries]
        else:
            sampled.is_aligned = False
            sampled.log_probs += [math.nan] * len(ids)
        shown = self._decoding.pictures
        # The engine saw another prompt than the one that is recorded; or the reply has a place of a picture or a video,
        # which no forward pass can fill.
        if shown is not None and (meta.prompt_tokens != self._asked or not shown.reserved.isdisjoint(ids)):
            sampled.is_aligned = False
        if self._top_logprobs:
            tables = (meta.output_top_logprobs or [])[: len(ids)]
            sampled.top += [*tables, *[None] * (len(ids) - len(tables))]
        sampled.ids += ids
        if not sampled.resumed:
            sampled.cached_tokens = min(max(meta.cached_tokens, 0), len(self._prompt_ids))
        assert self._use is not None
        version, runs = self._use.weight_version, sampled.runs
        if runs and runs[-1][0] == version:
            runs[-1][1] += len(ids)
        else:
            runs.append([version, len(ids)])
        return len(ids)

    def _is_end(self, finish: FinishReason) -> bool:
        if finish.type != "abort":
            self.sampled.finish = finish.type
            return True
        status = finish.status_code
        if isinstance(status, int) and 400 <= status < 500:
            raise EngineRefused((finish.message or "the engine refused the request")[:MOST_WORDS], status=status)
        return False  # a weight swap aborted the reply; our own aborts close the stream and never come here

    async def _take_version(self, within_s: float | None = None) -> None:
        """Hold the current version, then release the one held before."""
        former, self._stack = self._stack, AsyncExitStack()
        use = self._serving.use(
            policy=self._decoding.policy,
            opens=self._decoding.opens,
            is_not_resumable=self._decoding.is_not_resumable,
            within_s=within_s,
        )
        try:
            self._use = await self._stack.enter_async_context(use)
        finally:
            await former.aclose()

    def _has_lost_adapter(self, error: EngineRefused) -> bool:
        """Return True if the engine does not know the adapter that it got."""
        # At most once a reply: a second hold for the same adapter could let the client wait for ever.
        assert self._use is not None
        is_lost = is_unknown_adapter(error, self._use.lora_path) and not self._lost_adapter
        self._lost_adapter |= is_lost
        return is_lost

    async def _leave_lost_version(self) -> bool:
        """Take the current version after a resumed call was refused. False if the reply holds that one already."""
        # The restarted engine may not have the old adapter.
        assert self._use is not None
        if self._use.weight_version == self._serving.currents.get(self._decoding.policy):
            return False
        await self._take_version()
        return True


def _conversation(request: Request) -> str:
    """Return a name that the requests of one conversation share: of its session, else of its first messages."""
    session, users = request.scope.session_id, (n for n, said in enumerate(request.messages, 1) if said.role == "user")
    if session is None:
        # Python's own hash: it is for this process alone, and a text keeps it for the look-ups that follow.
        first = request.messages[: next(users, len(request.messages))]
        session = f"{hash(tuple((said.role, said.text()) for said in first)):x}"
    return f"{request.scope.user}/{session}"


def priority_of(request: Request) -> int:
    """Return the priority of a request's reply: people's chats go before those of a runner's many episodes."""
    return PRIORITY_CHAT if request.in_episode is None else PRIORITY_EPISODE
