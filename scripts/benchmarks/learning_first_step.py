"""First step of Binary RL by kind of credit, to first order, from a pool of the base's own chats, without training.

    scripts/benchmarks.sh learning_first_step --preset gpu      one GPU, a minute
    scripts/benchmarks.sh learning_first_step --preset cpu      two CPU cores, about ten minutes

The base answers training topics. The simulated user thanks or complains; after a complaint the base answers again
(`learning/simulation.py`). Each turn's gradient is taken once, by the product's own loss. A batch is 8 chats of two
turns drawn from the pool. Its gradient is the sum of the turns' gradients, each times its credit:

    none, others          by `method.baseline`; `ema` starts as `none`
    by turn               `others` among first turns and among second ones
    praise only           1 for each reply with thanks
    whatever was said     1 for every reply, the control: the effect of the mean over a reply's tokens by itself
    demonstrations        1 for each reply with thanks after a complaint, behind the question itself, as a user may send
                          it to `/v1/feedback`; 0 for the turns

To first order, the table shows AdamW's first step, and 8 steps on 8 batches at the trainer's own moments:

    gain    change of the log-prob per token of replies that meet the preference, after the plain prompt: the direction
            of distillation. The replies are the base's to held-out topics, when it reads the wish. ± standard deviation
            over batches
    KL      per token, on the base's own replies to held-out topics; to first order it does not saturate
    ratio   gain / √KL: the gain for its cost
"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.learning.experiment import Plan, Run, Trained, Variant, ask_as, chats
from benchmarks.learning.fleet import Fleet
from benchmarks.learning.subject import Subject, forced_log_probs
from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.offline.personas import MEASURED, PREFERENCES, Preference, topics
from openclaw_rl.settings import ModelSettings, TrainerSettings
from openclaw_rl.trainers.step import accumulate
from openclaw_rl.types import Ids, Sample, VersionRun

BATCH = 16
STEPS = 8
CREDITS = ("none", "others", "by turn", "praise only", "whatever was said", "demonstrations")


@dataclass(frozen=True, slots=True)
class Chat:
    first: Sample
    """Reply to a question, with the user's reward."""
    second: Sample
    """Reply to the complaint; after thanks, reply to another question."""
    demonstration: Sample | None
    """Second reply behind the first question, if the user thanked for it after a complaint."""


@dataclass(frozen=True, slots=True)
class Pool:
    chats: list[Chat]
    wished: list[Sample]
    """Replies that meet the preference, behind the plain prompt."""
    own: list[Sample]
    """The base's replies to held-out topics."""


def make_pool(subject: Subject, preference: Preference, rounds: int, held_out: int, tokens: int) -> Pool:
    plan = Plan(turns=2 * BATCH, reply_tokens=tokens)
    variant = Variant.parse("pool:reads_request=1,follows_up=1,demonstrates=1")
    found: list[Chat] = []
    fleet: Fleet | None = None
    for seed in range(rounds):
        run = Trained(Run("binary_rl", preference.name, seed, variant), subject, plan)
        fleet = Fleet([run.policy], subject.end_id)
        asked, replies, said = chats(fleet, [run], plan, 1, follows_up=True)
        batch = asyncio.run(run.user.round(asked[0], replies[0], said[0], 0, run.sampling))
        by_id = {sample.sample_id: sample for sample in batch.samples}
        for n in range(BATCH):
            pair = by_id.get(f"v0-{n}"), by_id.get(f"v0-{n + BATCH}")
            if pair[0] is not None and pair[1] is not None:
                found.append(Chat(pair[0], pair[1], by_id.get(f"v0-{n + BATCH}-demo")))
    assert fleet is not None
    asked_of = topics("held_out")[:held_out]
    plain = [subject.prompt(preference.question(topic)) for topic in asked_of]
    hinted = [subject.prompt(ask_as(preference, topic, "hinted", n)) for n, topic in enumerate(asked_of)]
    own, wished = (fleet.generate([prompts], tokens, plan.temperature, [8000])[0] for prompts in (plain, hinted))
    met = [
        (prompt, reply.ids)
        for topic, prompt, reply in zip(asked_of, plain, wished, strict=True)
        if not preference.complaint(
            topic, subject.text(reply.ids), has_ended=reply.ids[-1] == subject.end_id, reads_request=True
        )
    ]
    policy = subject.new_policy(TrainerSettings(device=subject.device))
    values = forced_log_probs(policy, met, plan.temperature)
    return Pool(
        found,
        [_sample(*pair, tuple(own), plan.temperature) for pair, own in zip(met, values, strict=True)],
        [_sample(p, reply.ids, reply.log_probs, plan.temperature) for p, reply in zip(plain, own, strict=True)],
    )


def _sample(prompt: Ids, reply: Ids, log_probs: tuple[float, ...], temperature: float) -> Sample:
    return Sample(
        sample_id="",
        prompt_ids=prompt,
        response_ids=reply,
        loss_mask=(True,) * len(reply),
        rollout_log_probs=log_probs,
        versions=(VersionRun(0, len(reply)),),
        temperature=temperature,
        reward=1.0,
    )


def gradients(subject: Subject, samples: Sequence[Sample]) -> Tensor:
    """Return the ascent direction of each sample's mean log-prob, [samples, parameters], by the product's loss."""
    trainer = TrainerSettings(device=subject.device, dtype="float32")
    policy = subject.new_policy(trainer)
    trained = [p for name, p in policy.parameters.items() if "lora_B" in name]  # A gets none while B is 0
    rows = []
    for sample in samples:
        policy.model.zero_grad(set_to_none=True)
        credit = [[1.0] * len(sample.response_ids)]
        accumulate(policy, METHOD, [sample], credit, trainer, BinarySettings())
        rows.append(-torch.cat([p.grad.flatten() for p in trained if p.grad is not None]).half())
    return torch.stack(rows)


def credit_of(batch: Sequence[Chat], name: str) -> tuple[list[float], list[float], list[float]]:
    """Return the credits of each chat's first turn, second turn and demonstration."""
    first, second = [chat.first for chat in batch], [chat.second for chat in batch]
    nothing = [0.0] * len(batch)
    if name == "demonstrations":
        return nothing, nothing, [float(chat.demonstration is not None) for chat in batch]
    if name == "whatever was said":
        return [1.0] * len(batch), [1.0] * len(batch), nothing
    if name == "praise only":
        return _praise(first), _praise(second), nothing
    if name == "by turn":
        return _less_baseline(first, "others"), _less_baseline(second, "others"), nothing
    both = _less_baseline([*first, *second], name)
    return both[: len(first)], both[len(first) :], nothing


def _praise(samples: Sequence[Sample]) -> list[float]:
    return [max(0.0, sample.reward or 0.0) for sample in samples]


def _less_baseline(samples: Sequence[Sample], baseline: str) -> list[float]:
    settings = BinarySettings(baseline=baseline)
    return [row[0] for row in METHOD.advantages(samples, settings, {})]


def first_order(
    credit: Tensor,
    of_pool: Tensor,
    wished: Tensor,
    own: Tensor,
    lengths: Sequence[int],
    trainer: TrainerSettings,
) -> tuple[Tensor, Tensor]:
    """Return the gain and the KL [R] of R runs of S steps each.

    Credit is [R, S, samples], of a mean over each batch. The others are gradients of mean log-probs; `lengths` are the
    tokens of `own`."""
    credit = credit.to(of_pool.device)
    gain = torch.zeros(len(credit), device=of_pool.device)
    shift = torch.zeros(len(credit), len(own), device=of_pool.device)
    for part, target, base in zip(*(m.split(100_000, dim=1) for m in (of_pool, wished, own)), strict=True):
        moved = adam((credit @ part.float()).transpose(0, 1), trainer)
        gain += moved @ target.float().mean(0)
        shift += moved @ base.float().T
    # Fisher: the mean over replies of (Σ_t ∇ log π · step)² / 2, a token's share of it.
    return gain, 0.5 * (shift.square() * torch.tensor(lengths, device=shift.device)).mean(1)


def adam(gradients: Tensor, trainer: TrainerSettings) -> Tensor:
    """Return the sum of AdamW's steps along these gradients [S, …]; 0 for parameters without any gradient yet."""
    mean, square, moved = (torch.zeros_like(gradients[0]) for _ in range(3))
    for k, gradient in enumerate(gradients, 1):
        mean = trainer.beta1 * mean + (1 - trainer.beta1) * gradient
        square = trainer.beta2 * square + (1 - trainer.beta2) * gradient.square()
        root = (square / (1 - trainer.beta2**k)).sqrt()
        moved += trainer.learning_rate * mean / (1 - trainer.beta1**k) / root.clamp(min=1e-30)
    return moved


def table(subject: Subject, pool: Pool, runs: int, trainer: TrainerSettings) -> list[str]:
    n = len(pool.chats)
    demonstrations = [chat.demonstration for chat in pool.chats if chat.demonstration is not None]
    place = iter(range(2 * n, 2 * n + len(demonstrations)))
    of_chat = [next(place) if chat.demonstration is not None else None for chat in pool.chats]
    samples = [*(chat.first for chat in pool.chats), *(chat.second for chat in pool.chats), *demonstrations]
    of_pool, wished, own = (gradients(subject, some) for some in (samples, pool.wished, pool.own))
    lengths = [len(one.response_ids) for one in pool.own]
    lines = [
        "| credit | batches that step | first step: ratio | 8 steps: gain | KL | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in CREDITS:
        dice, weights = random.Random(0), torch.zeros(runs, STEPS, len(samples))
        for batch in weights.view(-1, len(samples)):
            drawn = dice.sample(range(n), BATCH // 2)
            for k, *credit in zip(drawn, *credit_of([pool.chats[k] for k in drawn], name), strict=True):
                for where, value in zip((k, n + k, of_chat[k]), credit, strict=True):
                    if where is not None:
                        batch[where] = value / BATCH
        each = weights.view(-1, 1, len(samples))
        each = each[each.flatten(1).any(1)]
        gain, kl = first_order(each, of_pool, wished, own, lengths, trainer)
        gains, costs = first_order(weights, of_pool, wished, own, lengths, trainer)
        cells = [name, f"{len(each)} of {runs * STEPS}", _spread((gain / kl.sqrt()).tolist(), 2)]
        cells += [_spread(gains.tolist(), 3), f"{float(costs.mean()):.3f}", _spread((gains / costs.sqrt()).tolist(), 2)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):+.{digits}f} ± {statistics.pstdev(values):.{digits}f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=("gpu", "cpu", "smoke"), default="cpu")
    parser.add_argument("--preferences", nargs="+", choices=sorted(PREFERENCES), default=list(MEASURED))
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/openclaw-rl").expanduser())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default=None, help="name of the results; default: the preset")
    args = parser.parse_args()
    device = "cuda" if args.preset == "gpu" else "cpu"
    rounds, held_out, tokens, runs = {"gpu": (8, 48, 96, 32), "cpu": (3, 32, 96, 12), "smoke": (1, 4, 48, 2)}[
        args.preset
    ]
    subject = Subject(ModelSettings(path="bundled"), args.cache, device)
    trainer = TrainerSettings(device=device)
    lines = ["# Steps of Binary RL from the base, to first order", ""]
    lines += [f"- preset: {args.preset}, {device}; rate {trainer.learning_rate:g}"]
    for name in args.preferences:
        pool = make_pool(subject, PREFERENCES[name], rounds, held_out, tokens)
        lines += ["", f"## {name}", ""]
        for what, some in (("first", [c.first for c in pool.chats]), ("second", [c.second for c in pool.chats])):
            thanked = [sample for sample in some if (sample.reward or 0) > 0]
            lines.append(f"- {what} turns in the pool: {len(some)}, thanked for: {len(thanked)}")
        lines += [f"- replies that meet the preference: {len(pool.wished)}", ""]
        lines += table(subject, pool, runs, trainer)
    text = "\n".join(lines) + "\n"
    (args.out / f"learning_first_step-{args.name or args.preset}.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
