"""Where does one step of Binary RL lead, by its baseline? From a pool of the base's own turns, without a training run.

    python benchmarks/learning_first_step.py --preset gpu      one GPU, a minute
    python benchmarks/learning_first_step.py --preset cpu      two CPU cores, about ten minutes

The base answers training topics; the simulated user thanks or complains, and where it complained the base answers again
(`learning/simulation.py`). Each turn's gradient is taken once, by the product's own loss. A batch's gradient is
then a sum of these with the credit that `method.advantages` gives under a baseline, and AdamW's first step is the rate
times its sign. To first order the table says of such steps, over many batches of 16 drawn from the pool:

    gain    change of the log-prob per token of replies that meet the preference (the base's, when it reads the wish, to
            held-out topics), after the plain prompt: where distillation would lead. ± standard deviation over batches
    KL      per token, on the base's own replies to held-out topics
    ratio   gain / √KL: what a step leads to for what it costs; its ± is the noise that the baseline is to lessen
"""

import argparse
import asyncio
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from learning.experiment import Plan, Run, Trained, Variant, ask_as, chats
from learning.fleet import Fleet
from learning.preferences import PREFERENCES, Preference, topics
from learning.subject import Subject, forced_log_probs
from torch import Tensor

from openclaw_rl.methods.binary_rl import METHOD
from openclaw_rl.settings import MethodSettings, ModelSettings, TrainerSettings
from openclaw_rl.trainers.step import accumulate
from openclaw_rl.types import Ids, Sample, VersionRun

BATCH = 16
BASELINES = ("none", "others")
"""`ema` starts as `none`. `thanked`: only what was thanked for gets credit."""


@dataclass(frozen=True, slots=True)
class Pool:
    first: list[Sample]
    """Replies to a question; the reward is the user's."""
    second: list[Sample]
    """Replies to a complaint."""
    wished: list[Sample]
    """Replies that meet the preference, behind the plain prompt."""
    own: list[Sample]
    """The base's replies to held-out topics."""


def make_pool(subject: Subject, preference: Preference, rounds: int, held_out: int, tokens: int) -> Pool:
    plan = Plan(turns=2 * BATCH, reply_tokens=tokens)
    variant = Variant.parse("pool:reads_request=1,follows_up=1")
    first: list[Sample] = []
    second: list[Sample] = []
    fleet: Fleet | None = None
    for seed in range(rounds):
        run = Trained(Run("binary_rl", preference.name, seed, variant), subject, plan)
        fleet = Fleet([run.policy], subject.end_id)
        asked, replies, said = chats(fleet, [run], plan, 1, follows_up=True)
        batch = asyncio.run(run.user.round(asked[0], replies[0], said[0], 0, run.sampling))
        is_first = {f"v0-{n}": len(one.messages) == 1 for n, one in enumerate(asked[0])}
        for sample in batch.samples:
            (first if is_first[sample.sample_id] else second).append(sample)
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
        first,
        second,
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
    """[samples, parameters]: the way up of each sample's mean log-prob, by the product's loss at credit 1."""
    trainer = TrainerSettings(device=subject.device, dtype="float32")
    policy = subject.new_policy(trainer)
    trained = [p for name, p in policy.parameters.items() if "lora_B" in name]  # A gets none while B is 0
    rows = []
    for sample in samples:
        policy.model.zero_grad(set_to_none=True)
        credit = [[1.0] * len(sample.response_ids)]
        accumulate(policy, METHOD, [sample], credit, trainer, MethodSettings())
        rows.append(-torch.cat([p.grad.flatten() for p in trained if p.grad is not None]).half())
    return torch.stack(rows)


def credit_of(batch: Sequence[Sample], baseline: str) -> list[float]:
    if baseline == "thanked":
        return [max(0.0, sample.reward or 0.0) for sample in batch]
    settings = MethodSettings(baseline=baseline)  # type: ignore[arg-type]
    return [row[0] for row in METHOD.advantages(batch, settings, {})]


def first_order(
    credit: Tensor, of_pool: Tensor, wished: Tensor, own: Tensor, lengths: Sequence[int], rate: float
) -> tuple[Tensor, Tensor]:
    """[R]: the gain and the KL of R first steps. Credit [R, samples] of a mean over the batch; the others are gradients
    of mean log-probs, `lengths` the tokens of `own`."""
    credit = credit.to(of_pool.device)
    gain = torch.zeros(len(credit), device=of_pool.device)
    shift = torch.zeros(len(credit), len(own), device=of_pool.device)
    for part, target, base in zip(*(m.split(100_000, dim=1) for m in (of_pool, wished, own)), strict=True):
        step = rate * (credit @ part.float()).sign()  # AdamW's first
        gain += step @ target.float().mean(0)
        shift += step @ base.float().T
    # Fisher: the mean over replies of (Σ_t ∇ log π · step)² / 2, a token's share of it.
    return gain, 0.5 * (shift.square() * torch.tensor(lengths, device=shift.device)).mean(1)


def table(subject: Subject, pool: Pool, draws: int, rate: float) -> list[str]:
    dice, samples = random.Random(0), [*pool.first, *pool.second]
    places, n = range(len(samples)), len(pool.first)
    users = {"first turns": (BATCH, 0), "half first, half second turns": (BATCH // 2, BATCH // 2)}
    names, rows = [], []
    for user, (firsts, seconds) in users.items():
        for _ in range(draws):
            drawn = dice.sample(places[:n], firsts) + dice.sample(places[n:], seconds)
            for baseline in (*BASELINES, "thanked"):
                weights = torch.zeros(len(samples))
                weights[drawn] = torch.tensor(credit_of([samples[k] for k in drawn], baseline)) / BATCH
                names.append((user, baseline))
                rows.append(weights)
    of_pool, wished, own = (gradients(subject, some) for some in (samples, pool.wished, pool.own))
    gain, kl = first_order(torch.stack(rows), of_pool, wished, own, [len(one.response_ids) for one in pool.own], rate)
    lines = ["| user | baseline | batches that step | gain | KL | ratio |", "| --- | --- | --- | --- | --- | --- |"]
    for key in dict.fromkeys(names):
        own_rows = [k for k, name in enumerate(names) if name == key and rows[k].any()]
        gains, costs = gain[own_rows].tolist(), kl[own_rows].tolist()
        cells = [*key, f"{len(own_rows)} of {draws}"]
        if own_rows:
            ratios = [g / math.sqrt(c) for g, c in zip(gains, costs, strict=True)]
            cells += [_spread(gains, 4), f"{statistics.fmean(costs):.4f}", _spread(ratios, 2)]
        else:
            cells += ["–"] * 3
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):+.{digits}f} ± {statistics.pstdev(values):.{digits}f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--preset", choices=("gpu", "cpu", "smoke"), default="cpu")
    parser.add_argument("--preferences", nargs="+", choices=sorted(PREFERENCES), default=list(PREFERENCES))
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/openclaw-rl").expanduser())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default=None, help="of the results; the preset when unset")
    args = parser.parse_args()
    device = "cuda" if args.preset == "gpu" else "cpu"
    rounds, held_out, tokens, draws = {"gpu": (8, 48, 96, 64), "cpu": (4, 16, 96, 24), "smoke": (1, 4, 48, 2)}[
        args.preset
    ]
    subject = Subject(ModelSettings(path="bundled"), args.cache, device)
    lines = ["# One step of Binary RL from the base, to first order", "", f"- preset: {args.preset}, {device}"]
    for name in args.preferences:
        pool = make_pool(subject, PREFERENCES[name], rounds, held_out, tokens)
        lines += ["", f"## {name}", ""]
        for what, some in (("first", pool.first), ("second", pool.second)):
            thanked = sum((sample.reward or 0) > 0 for sample in some)
            lines.append(f"- {what} turns in the pool: {len(some)}, thanked for: {thanked}")
        lines += [f"- replies that meet the preference: {len(pool.wished)}", ""]
        lines += table(subject, pool, draws, TrainerSettings().learning_rate)
    text = "\n".join(lines) + "\n"
    (args.out / f"learning_first_step-{args.name or args.preset}.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
