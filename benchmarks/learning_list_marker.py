"""Does the loop teach what the reward says, and only that? The bundled model, lists against prose, three seeds.

    python benchmarks/learning_list_marker.py                 two CPU cores: an estimated 10 minutes
    python benchmarks/learning_list_marker.py --preset gpu    one GPU: new replies for every update, more of each
                                       … --preset gpu-stale   one GPU, 5 minutes: more of each, replies of the base

Real replies of the policy at temperature 0.7 are judged by a rule (a list marker at the start of a line: -1, else +1),
and trained on with the product's own method, loss and optimizer (`LocalLearner.step`). Arms, each from the same base:

    rewarded   +1 for prose, -1 for lists          random   ±1 by coin: gradients of the same size, without meaning
    negated    the opposite                        zero     every reward 0

Measured on held-out topics: the change of the log-odds of a list marker as the first token of the reply's first line,
exact (nothing is sampled), over the prompts whose base rate lies in [0.3, 0.7]. Beside it, because a score alone can be
hacked: NLL of neutral text, KL to the base on the arm's own replies, and relevance (log-prob of the question given the
reply under the base, against other topics' questions). With the cpu preset an arm's replies all come from the base, so
that every update after the first is 1 to 3 versions stale, as in a running server.

Because nothing is sampled in the measure, the zero arm's spread is 0 by construction and exceeding it says little; the
random arm is the control that can fail, and `holds` asks for both.
"""

import argparse
import json
import math
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from learning.subject import Subject as SharedSubject
from learning.subject import forced_log_probs

from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.settings import ModelSettings, TrainerSettings
from openclaw_rl.trainers.base import NoStep
from openclaw_rl.types import Ids, Sample, VersionRun

TEMPERATURE = 0.7
ARMS = ("rewarded", "negated", "random", "zero")
TRAIN_TOPICS = [
    "sleep better",
    "learn to cook",
    "start running",
    "save money",
    "grow tomatoes",
    "read more books",
    "clean a bicycle",
    "train a puppy",
    "write a short story",
    "learn a new language",
    "pack for a week of hiking",
    "make friends in a new city",
    "paint a room",
    "stop procrastinating",
    "prepare for a job interview",
    "bake bread",
    "remember names",
    "speak in public",
    "fix a leaking tap",
    "take good photographs",
    "play the guitar",
    "keep a diary",
    "wake up early",
    "swim faster",
]
HELD_OUT_TOPICS = [
    "draw portraits",
    "sew a button",
    "care for a cactus",
    "plan a birthday party",
    "brew good coffee",
    "organise a small kitchen",
    "practise the piano",
    "choose a good book",
    "repair a torn jacket",
    "keep goldfish healthy",
    "learn chess",
    "cycle to work in winter",
    "lower an electricity bill",
    "write a thank-you letter",
    "calm a crying baby",
    "prepare for a long flight",
    "store winter clothes",
    "make a paper kite",
    "taste wine",
    "build a bird house",
]
TRAIN_FORMS = (
    "Give me three tips to {}.",
    "Suggest three steps to {}.",
    "Name three ways to {}.",
    "Tell me how to {}.",
)
HELD_OUT_FORMS = TRAIN_FORMS[:3]
NEUTRAL_TEXT = (
    "The harbour was quiet in the early morning. Two fishing boats lay beside the pier, and a man in a blue coat was "
    "mending a net. Behind the warehouses the road climbed towards the village, past gardens with low stone walls.",
    "Water boils at a lower temperature on a mountain than at the sea, because the air presses on it with less weight. "
    "For the same reason rice takes longer to cook there, and bread rises faster than a baker would expect.",
    "In 1911 the town council decided to build a new library. The old one had two rooms above a shop, and its books "
    "were damp. It took four years, most of them spent on the roof, until the doors were opened in November.",
)
MARKER = re.compile(r"^[ \t]*(?:[-*•+]|\d{1,2}[.)])[ \t]", re.MULTILINE)
MARKER_TOKEN = re.compile(r" ?(?:[-*•+]|\d)")


@dataclass(frozen=True)
class Preset:
    updates: int
    batch: int
    reply_tokens: int
    relevance_prompts: int
    seeds: tuple[int, ...] = (0, 1, 2)
    fresh: bool = False
    """Sample new replies from the current policy for every update."""


PRESETS = {
    "cpu": Preset(updates=4, batch=16, reply_tokens=40, relevance_prompts=12),
    "gpu": Preset(updates=12, batch=32, reply_tokens=64, relevance_prompts=40, fresh=True),
    # More of the same as `cpu`, on other seeds: up to 7 versions stale at the end, and minutes in place of half an
    # hour.
    "gpu-stale": Preset(updates=8, batch=32, reply_tokens=40, relevance_prompts=24, seeds=(3, 4, 5)),
    "smoke": Preset(updates=1, batch=4, reply_tokens=8, relevance_prompts=3, seeds=(0,)),
}


class Subject(SharedSubject):
    """One policy and its learner, its replies, and the exact probability of a list."""

    def __init__(self, model: ModelSettings, cache: Path, device: str, settings: TrainerSettings) -> None:
        super().__init__(model, cache, device)
        self.policy = self.new_policy(settings)
        self.learner = self.new_learner(self.policy, METHOD, settings, BinarySettings())
        vocabulary = [self.tokenizer.decode([token]) for token in range(len(self.tokenizer))]
        self.marker_ids = [token for token, text in enumerate(vocabulary) if MARKER_TOKEN.fullmatch(text)]

    @torch.no_grad()
    def generate(self, prompts: Sequence[Ids], max_tokens: int, generator: torch.Generator) -> list[Sample]:
        """One reply for each prompt, sampled together; rewards are still to be given."""
        device, end = self.policy.device, self.tokenizer.eos_token_id
        ids, mask = self._left_padded(prompts)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        replies: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        cache = None
        for _ in range(max_tokens):
            out = self.policy.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            distribution = torch.log_softmax(out.logits[:, -1].float() / TEMPERATURE, -1).cpu()
            drawn = torch.multinomial(distribution.exp(), 1, generator=generator)
            for row, token in enumerate(drawn[:, 0].tolist()):
                if not replies[row] or replies[row][-1] != end:
                    replies[row].append(token)
                    log_probs[row].append(float(distribution[row, token]))
            if all(reply[-1] == end for reply in replies):
                break
            ids = drawn.to(device)
            mask = torch.cat([mask, torch.ones_like(ids)], -1)
            positions = positions[:, -1:] + 1
        return [
            Sample(
                str(n),
                prompt,
                tuple(reply),
                (True,) * len(reply),
                tuple(values),
                (VersionRun(0, len(reply)),),
                TEMPERATURE,
            )
            for n, (prompt, reply, values) in enumerate(zip(prompts, replies, log_probs, strict=True))
        ]

    @torch.no_grad()
    def marker_log_odds(self, prompts: Sequence[Ids]) -> list[float]:
        """log p/(1-p) of a list marker as the reply's first token, at temperature 1."""
        found = []
        for begin in range(0, len(prompts), 16):
            ids, mask = self._left_padded(prompts[begin : begin + 16])
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            out = self.policy.model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1)
            log_p = torch.log_softmax(out.logits[:, -1].double(), -1)
            inside = log_p[:, self.marker_ids].logsumexp(-1)
            found += (inside - torch.log1p(-inside.exp())).tolist()
        return found

    def mean_log_probs(self, pairs: Sequence[tuple[Ids, Ids]], temperature: float = 1.0) -> list[float]:
        """Mean log-prob per token of each forced reply after its prompt."""
        return [statistics.fmean(values) for values in forced_log_probs(self.policy, pairs, temperature)]

    def _left_padded(self, prompts: Sequence[Ids]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, prompts))
        ids, mask = (
            torch.zeros(len(prompts), width, dtype=torch.long),
            torch.zeros(len(prompts), width, dtype=torch.long),
        )
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
        return ids.to(self.policy.device), mask.to(self.policy.device)


@dataclass(frozen=True)
class Quality:
    """What the policy lost elsewhere."""

    list_share: float
    """Of sampled replies to held-out prompts, by the training rule."""
    neutral_nll: float
    kl_to_base: float
    relevance: float
    """Mean log-prob per question token given the reply, own question minus other topics', under the base."""
    top1: float
    """Share of replies whose own question is the likeliest of four."""
    reply_tokens: float


@dataclass(frozen=True)
class Run:
    arm: str
    seed: int
    change: float
    """Of the mean log-odds on held-out prompts."""
    changes: tuple[float, ...]
    """After each update."""
    mean_reward: float
    quality: Quality


def reward(subject: Subject, sample: Sample) -> float:
    return -1.0 if MARKER.search(subject.tokenizer.decode(list(sample.response_ids))) else 1.0


def quality(subject: Subject, questions: Sequence[str], max_tokens: int, seed: int) -> Quality:
    generator = torch.Generator().manual_seed(1000 + seed)
    prompts = [subject.prompt(question) for question in questions]
    replies = subject.generate(prompts, max_tokens, generator)
    pairs = [(sample.prompt_ids, sample.response_ids) for sample in replies]
    own = subject.mean_log_probs(pairs, TEMPERATURE)
    nll = -statistics.fmean(subject.mean_log_probs([(ids[:4], ids[4:]) for ids in map(subject.encode, NEUTRAL_TEXT)]))
    dice, asked, n = random.Random(seed), [], len(questions)
    for index, sample in enumerate(replies):
        text = subject.tokenizer.decode(list(sample.response_ids), skip_special_tokens=True)
        about = subject.prompt(f"Here is a text:\n\n{text}\n\nWrite the request that this text answers.")
        others = dice.sample([other for other in range(n) if other != index], min(3, n - 1))
        asked.append([(about, subject.encode(questions[k])) for k in (index, *others)])
    with subject.policy.reference():
        base = subject.mean_log_probs(pairs, TEMPERATURE)
        flat = subject.mean_log_probs([pair for candidates in asked for pair in candidates])
    scores = [[flat.pop(0) for _ in candidates] for candidates in asked]
    return Quality(
        list_share=statistics.fmean(reward(subject, sample) < 0 for sample in replies),
        neutral_nll=nll,
        kl_to_base=statistics.fmean(a - b for a, b in zip(own, base, strict=True)),
        relevance=statistics.fmean(values[0] - statistics.fmean(values[1:]) for values in scores),
        top1=statistics.fmean(values[0] == max(values) for values in scores),
        reply_tokens=statistics.fmean(len(sample.response_ids) for sample in replies),
    )


def draw(subject: Subject, count: int, max_tokens: int, seed: int) -> list[Sample]:
    dice = random.Random(seed)
    questions = [dice.choice(TRAIN_FORMS).format(dice.choice(TRAIN_TOPICS)) for _ in range(count)]
    samples = subject.generate([subject.prompt(q) for q in questions], max_tokens, torch.Generator().manual_seed(seed))
    return [replace(sample, sample_id=f"{seed}-{n}") for n, sample in enumerate(samples)]


def train(
    subject: Subject, arm: str, seed: int, preset: Preset, pool: Sequence[Sample], held_out: Sequence[Ids], base: float
) -> tuple[list[float], float]:
    """The arm's updates; the change of the mean log-odds after each, and the mean reward of its samples by the rule."""
    subject.learner.load(None, fresh_moments=False)
    coin, changes, seen = random.Random(seed), [], []
    for update in range(preset.updates):
        if preset.fresh:
            batch = draw(subject, preset.batch, preset.reply_tokens, 100 * (seed + 1) + update)
        else:
            batch = list(pool[update * preset.batch : (update + 1) * preset.batch])
        told = []
        for sample in batch:
            by_rule = reward(subject, sample)
            seen.append(by_rule)
            value = {"rewarded": by_rule, "negated": -by_rule, "random": coin.choice((-1.0, 1.0)), "zero": 0.0}[arm]
            told.append(replace(sample, reward=value))
        result = subject.learner.step(told, lambda: None)
        if isinstance(result, NoStep):
            raise RuntimeError(f"{arm}, seed {seed}: {result.reason}")
        changes.append(statistics.fmean(subject.marker_log_odds(held_out)) - base)
        print(
            f"  {arm:9} seed {seed} update {update + 1}: change {changes[-1]:+.3f}, "
            f"loss {result.metrics['loss']:+.3f}, |old-rollout| {result.metrics['abs_log_ratio']:.3f}",
            flush=True,
        )
    return changes, statistics.fmean(seen)


def verdict(runs: Sequence[Run]) -> dict[str, object]:
    change = {arm: [run.change for run in runs if run.arm == arm] for arm in ARMS}
    differences = [up - down for up, down in zip(change["negated"], change["rewarded"], strict=True)]
    spread = {arm: max(change[arm]) - min(change[arm]) for arm in ("zero", "random")}
    falls, rises = all(value < 0 for value in change["rewarded"]), all(value > 0 for value in change["negated"])
    return {
        "change": change,
        "difference_negated_minus_rewarded": differences,
        "control_spread_max_minus_min": spread,
        "rewarded_falls": falls,
        "negated_rises": rises,
        "one_sign_in_all_seeds": all(value > 0 for value in differences),
        "exceeds_twice_the_zero_reward_spread": min(differences) > 2 * spread["zero"],
        "exceeds_twice_the_random_reward_spread": min(differences) > 2 * spread["random"],
        "holds": falls and rises and min(differences) > 2 * max(spread.values()),
    }


def table(runs: Sequence[Run], base: Quality) -> str:
    lines = [
        "| arm | seed | change of log-odds | list share | neutral NLL | KL to base | relevance | top-1 of 4 | tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, seed, change, q in [("base", "", 0.0, base), *((r.arm, str(r.seed), r.change, r.quality) for r in runs)]:
        lines.append(
            f"| {arm} | {seed} | {change:+.3f} | {q.list_share:.2f} | {q.neutral_nll:.3f} | {q.kl_to_base:.3f} "
            f"| {q.relevance:.3f} | {q.top1:.2f} | {q.reply_tokens:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--device", default=None, help="cpu or cuda; by the preset when unset")
    parser.add_argument("--model", default="bundled", help="`bundled`, a folder, a .gguf file")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/openclaw-rl").expanduser())
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    preset, started = PRESETS[args.preset], time.perf_counter()
    device = args.device or ("cuda" if args.preset.startswith("gpu") else "cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = TrainerSettings(device=device, learning_rate=args.learning_rate, micro_batch_tokens=1024)
    subject = Subject(ModelSettings(path=args.model), args.cache, device, settings)

    candidates = [form.format(topic) for topic in HELD_OUT_TOPICS for form in HELD_OUT_FORMS]
    odds = dict(zip(candidates, subject.marker_log_odds([subject.prompt(q) for q in candidates]), strict=True))
    chosen = [question for question in candidates if abs(odds[question]) <= math.log(0.7 / 0.3)]
    held_out, base_odds = [subject.prompt(q) for q in chosen], statistics.fmean(odds[q] for q in chosen)
    asked = chosen[:: max(1, len(chosen) // preset.relevance_prompts)][: preset.relevance_prompts]
    print(f"{len(chosen)} of {len(candidates)} held-out prompts have a base rate in [0.3, 0.7]", flush=True)

    base, runs = quality(subject, asked, preset.reply_tokens, seed=0), []
    for seed in preset.seeds:
        subject.learner.load(None, fresh_moments=False)
        pool = (
            [] if preset.fresh else draw(subject, preset.updates * preset.batch, preset.reply_tokens, 100 * (seed + 1))
        )
        for arm in ARMS:
            changes, mean_reward = train(subject, arm, seed, preset, pool, held_out, base_odds)
            after = base if arm == "zero" else quality(subject, asked, preset.reply_tokens, seed)
            runs.append(Run(arm, seed, changes[-1], tuple(changes), mean_reward, after))
    result = {
        "model": subject.name,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "preset": args.preset,
        "settings": asdict(preset) | {"learning_rate": args.learning_rate, "temperature": TEMPERATURE},
        "held_out_prompts": len(chosen),
        "base_log_odds": base_odds,
        "base": asdict(base),
        "verdict": verdict(runs),
        "runs": [asdict(run) for run in runs],
        "seconds": round(time.perf_counter() - started, 1),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"learning_list_marker-{args.preset}.json"
    file.write_text(json.dumps(result, indent=1))
    summary = json.dumps(result["verdict"], indent=1)
    text = f"# List marker, {subject.name}, preset {args.preset}\n\n{table(runs, base)}\n\n```json\n{summary}\n```\n"
    file.with_suffix(".md").write_text(text)
    print(text, f"{result['seconds']} s → {file}", sep="\n")
    return 0 if result["verdict"]["holds"] else 1  # type: ignore[index]


if __name__ == "__main__":
    raise SystemExit(main())
