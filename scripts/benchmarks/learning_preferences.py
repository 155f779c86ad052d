"""Learning of a preference by the three methods, and its cost: the bundled model, two preferences, three seeds.

    scripts/benchmarks.sh learning_preferences --preset gpu       one GPU: the settings we ship, 3 methods × 2 × 3 seeds
    scripts/benchmarks.sh learning_preferences --preset sweep     one GPU: the variants of `SWEEP`, one seed
    scripts/benchmarks.sh learning_preferences --preset users     one GPU: the variants of `USERS`, three seeds
    scripts/benchmarks.sh learning_preferences --preset binary    one GPU: Binary RL by baseline, user and rate
    scripts/benchmarks.sh learning_preferences --preset cpu       two CPU cores, five minutes: one seed, fewer of all
    scripts/benchmarks.sh learning_preferences --report A.jsonl … tables and curves of results that exist

The policy answers questions of the training topics, 16 a round. A user simulated by rules thanks or complains in words.
The product's own rules judge, method, loss and LoRA step learn from it: up to 8 updates, each on new replies of the
current policy. Rules score replies to held-out topics before and after, as a share of the way from the base to the base
that reads the hint. KL, fluency and relevance to the question are measured too, since a policy can hack a score alone
(`learning/measures.py`). Replies come from a batched sampler (`learning/fleet.py`). Scoring pairs come from a plain
batched forward (`learning/engine.py`), or with `--pairs engine` from the real embedded engine.

`--preset binary` decides the settings of Binary RL on *short*. It runs four seeds of each candidate of `BINARY`, and of
Combined, which shares the baseline: 32 runs of one measurement each, an estimated 180 to 220 s on one H100 or H200 (42
runs with two measurements took 258 s). `--preferences no_lists --seeds 0 1 2` is the other half (24 runs). It answers
three questions, in this order:

    1. Do verdicts alone suffice, without credit while all are the same, at three times the rate?
       `follows others lr=1e-3` against `follows lr=1e-3` and `follows`
    2. If not, do the user's own demonstrations suffice? `follows demonstrates` against `follows`
    3. How much does `others` cost Combined?

A new default must beat the score of `shipped` and `follows` by more than the half ranges of both, on *short* or *no
lists*. Its relevance must be no less than that of the base that reads the wish, and Combined must not lose by it.

`--variant NAME:key=value,…` changes settings of `trainer` or `method`, or the user:

    reads_request=1       the user also complains of replies that are not about the question
    follows_up=1          the user stays in the chat after a complaint and judges the next reply
    demonstrates=1        the user then sends the reply that it thanked for, as a reply to the question itself
    hint_source=judge     a judge writes the wish in one canonical sentence; default `verbatim`: takes the complaint
"""

import argparse
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.learning.experiment import METHODS, Job, Plan, Run, Variant, shared_out, work
from benchmarks.learning.report import load, write_report
from openclaw_rl.models import resolve
from openclaw_rl.offline.personas import MEASURED, PREFERENCES
from openclaw_rl.settings import ModelSettings

PLANS = {
    "gpu": Plan(),
    "sweep": Plan(marks=(2, 4, 8), replies=1),
    "users": Plan(marks=(4, 8), replies=1),
    "binary": Plan(marks=(8,), replies=1),
    "cpu": Plan(updates=3, marks=(3,), reply_tokens=56, held_out=16, replies=1, others=1),
    "smoke": Plan(updates=1, turns=2, marks=(1,), reply_tokens=8, held_out=3, replies=1, others=1),
}
SEEDS = {"gpu": (0, 1, 2), "sweep": (0,), "users": (0, 1, 2), "binary": (0, 1, 2, 3), "cpu": (0,), "smoke": (0,)}
SWEEP: dict[str, tuple[str, ...]] = {
    "binary_rl": (
        "default:",
        "lr=3e-4:learning_rate=3e-4",
        "lr=3e-4 kl=.05:learning_rate=3e-4,kl_coef=0.05",
        "lr=3e-4 ema:learning_rate=3e-4,baseline=ema",
        "lr=3e-4 reads:learning_rate=3e-4,reads_request=1",
        "lr=3e-4 reads kl=.05 ema:learning_rate=3e-4,reads_request=1,kl_coef=0.05,baseline=ema",
    ),
    "opd": (
        "default:",
        "lr=3e-4:learning_rate=3e-4",
        "lr=3e-4 judge:learning_rate=3e-4,hint_source=judge",
        "lr=3e-4 clip=1:learning_rate=3e-4,opd_clip=1",
        "lr=3e-4 clip=5:learning_rate=3e-4,opd_clip=5",
        "lr=3e-4 base teacher:learning_rate=3e-4,teacher=base",
        "lr=3e-4 kl=.05:learning_rate=3e-4,kl_coef=0.05",
        "lr=3e-4 top_k=20:learning_rate=3e-4,top_k=20",
        "lr=6e-4:learning_rate=6e-4",
    ),
    "combine": (
        "default:",
        "lr=3e-4:learning_rate=3e-4",
        "lr=3e-4 w=.3:learning_rate=3e-4,binary_weight=0.3",
        "lr=3e-4 w=.1:learning_rate=3e-4,binary_weight=0.1",
        "lr=3e-4 w=.3 kl=.05:learning_rate=3e-4,binary_weight=0.3,kl_coef=0.05",
        "lr=3e-4 reads:learning_rate=3e-4,reads_request=1",
        "lr=3e-4 w=.3 reads ema:learning_rate=3e-4,binary_weight=0.3,reads_request=1,baseline=ema",
    ),
}

USERS: dict[str, tuple[str, ...]] = {
    "binary_rl": (
        "reads limit=1:reads_request=1,baseline_limit=1",
        "reads limit=1 follows:reads_request=1,baseline_limit=1,follows_up=1",
    ),
    "opd": ("reads:reads_request=1", "reads follows:reads_request=1,follows_up=1"),
    "combine": (
        "reads:reads_request=1",
        "reads limit=1:reads_request=1,baseline_limit=1",
        "reads limit=1 follows:reads_request=1,baseline_limit=1,follows_up=1",
    ),
}
BINARY: dict[str, tuple[str, ...]] = {
    "binary_rl": (
        "shipped:reads_request=1",
        "follows:reads_request=1,follows_up=1",
        "follows lr=1e-3:reads_request=1,follows_up=1,learning_rate=1e-3",
        "follows others:reads_request=1,follows_up=1,baseline=others",
        "follows others lr=1e-3:reads_request=1,follows_up=1,baseline=others,learning_rate=1e-3",
        "follows demonstrates:reads_request=1,follows_up=1,demonstrates=1",
    ),
    "opd": (),
    "combine": ("shipped:reads_request=1", "others:reads_request=1,baseline=others"),
}
"""Candidates that may make Binary RL learn *short*, and Combined with the baseline that it shares."""
VARIANTS = {"sweep": SWEEP, "users": USERS, "binary": BINARY}
SHIPPED = "shipped:reads_request=1"
"""The branches' own defaults, and a user who notices replies about another subject. They ship for OPD and Combined.
`openclaw_rl.settings.tuned` has the shipped settings of Binary RL for the bundled model, measured as a `--variant`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PLANS), default="cpu")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--preferences", nargs="+", choices=sorted(PREFERENCES), default=None)
    parser.add_argument("--seeds", nargs="+", type=int, default=None)
    parser.add_argument("--variant", action="append", default=[], help="NAME:key=value,…; may be repeated")
    parser.add_argument("--updates", type=int, default=None)
    parser.add_argument("--marks", nargs="+", type=int, default=None, help="updates after which to measure")
    parser.add_argument("--turns", type=int, default=None, help="turns of an update")
    parser.add_argument("--reply-tokens", type=int, default=None)
    parser.add_argument("--held-out", type=int, default=None, help="number of held-out topics")
    parser.add_argument("--pairs", choices=("forward", "engine"), default="forward", help="source of scoring pairs")
    parser.add_argument("--no-ends", action="store_true", help="do not measure the base again")
    parser.add_argument("--workers", type=int, default=None, help="processes; default: by the preset")
    parser.add_argument("--threads", type=int, default=None, help="threads of each worker")
    parser.add_argument("--device", default=None, help="cpu or cuda; default: by the preset")
    parser.add_argument("--model", default="bundled", help="`bundled`, a folder, a .gguf file (a Llama model)")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/openclaw-rl").expanduser())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default=None, help="name of the results; default: the preset")
    parser.add_argument(
        "--report", nargs="+", type=Path, default=None, help="only report these .jsonl files, without runs"
    )
    args = parser.parse_args()
    name = f"learning_preferences-{args.name or args.preset}"
    if args.report:
        print(write_report(load(args.report), args.out / name, {}))
        return 0

    started, is_gpu = time.perf_counter(), args.preset in ("gpu", *VARIANTS)
    device = args.device or ("cuda" if is_gpu else "cpu")
    plan = PLANS[args.preset]
    plan = replace(
        plan,
        updates=args.updates or plan.updates,
        marks=tuple(sorted({*(args.marks or plan.marks), args.updates or plan.updates})),
        turns=args.turns or plan.turns,
        reply_tokens=args.reply_tokens or plan.reply_tokens,
        held_out=args.held_out or plan.held_out,
    )
    if plan.held_out <= plan.others:
        parser.error(f"--held-out: relevance compares a reply's question with {plan.others} others")
    seeds = tuple(args.seeds or SEEDS[args.preset])
    chosen = {method: args.variant or VARIANTS.get(args.preset, {}).get(method, (SHIPPED,)) for method in METHODS}
    preferences = args.preferences or (["short"] if args.preset in ("binary", "cpu") else list(MEASURED))
    runs = [
        Run(method, preference, seed, Variant.parse(text))
        for seed in seeds
        for preference in preferences
        for method in args.methods
        for text in chosen[method]
    ]
    workers = args.workers or (5 if device == "cuda" else 1)
    model = ModelSettings(path=args.model)
    resolve.base_hash(resolve.resolve(model, args.cache))  # convert the model once, before the workers race for it
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / f"{name}.jsonl"
    results.write_text("")
    threads = args.threads or (2 if device == "cuda" else os.cpu_count() or 1)
    empty = Job(model, args.cache, device, threads, plan, results, seeds=seeds, uses_engine=args.pairs == "engine")
    jobs = shared_out(runs, workers, empty)
    if not args.no_ends:
        jobs.append(replace(empty, ends_of=tuple(preferences)))
    if device == "cpu":
        jobs.reverse()
    print(f"{len(runs)} runs in {len(jobs)} jobs on {device}", flush=True)
    with ProcessPoolExecutor(
        len(jobs) if device == "cuda" else 1, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        failed = [error for done in [pool.submit(work, job) for job in jobs] if (error := done.exception())]
    for error in failed:
        print(f"a worker failed: {error!r}", flush=True)  # before the report, which may be empty
    about = {
        "model": resolve.model_display_name(model),
        "device": _device_name(device),
        "plan": str(plan),
        "scoring pairs": "the embedded engine" if args.pairs == "engine" else "a plain forward",
        "seconds": round(time.perf_counter() - started),
    }
    print(write_report(load([results]), args.out / name, about))
    print(f"{about['seconds']} s → {results}")
    return 1 if failed else 0


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"{os.cpu_count()} CPU cores"
    import torch

    return str(torch.cuda.get_device_name())


if __name__ == "__main__":
    raise SystemExit(main())
