"""A chat on a pool of fake engines, whose tokens are scored under the versions that the reply names."""

from contextlib import aclosing

import pytest

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.proxy.generation import Decoding, EngineExtras, Generation, Sampled
from openclaw_rl.testing.fake_engine import BASE_SEED
from openclaw_rl.testing.toy_policy import ToyPolicy
from openclaw_rl.types import SamplingParams

PROMPT = (1, 5, 6)


async def versioned_chat(
    pool: PooledEngine, serving: VersionAdmission, policy: ToyPolicy, number: int, tokens: int
) -> Sampled:
    """Hold a chat to its end; each token's log-prob is that of the version which its run names."""
    sampling = SamplingParams(max_new_tokens=tokens)
    running = Generation(
        pool,
        serving,
        rid=f"r{number}",
        prompt_ids=(*PROMPT, 7 + number),
        decoding=Decoding(sampling, (), EngineExtras(ignore_eos=True), conversation=f"s{number}"),
    )
    async with running, aclosing(running.events()) as events:
        async for _ in events:
            pass
    sampled = running.sampled
    assert (len(sampled.ids), sampled.finish, sampled.is_aligned) == (tokens, "length", True)
    ids, values, at = [*PROMPT, 7 + number, *sampled.ids], [], len(PROMPT) + 1
    for version, length in sampled.runs:
        for _ in range(length):
            values.append(policy.log_prob(ids[: at + 1], at, BASE_SEED ^ version))
            at += 1
    assert sampled.log_probs == pytest.approx(values), sampled.runs
    return sampled
