"""Learning from a handful of corrections: the guided teacher, practice, anchors, and what they cost elsewhere.

    scripts/benchmarks.sh learning_practice --studies final     one GPU
    scripts/benchmarks.sh learning_practice --smoke --device cpu
    scripts/benchmarks.sh learning_practice --report A.jsonl …  table and curves of results that exist

The policy answers one round of questions of the training topics, as the base. The simulated user complains in words.
The product's method learns from the round. Then it practises: `Method.practise` scores new replies of the policy to the
corrected prompts under each prompt's own hint, and to anchors, which are prompts that no user corrected. Rules score
replies to held-out topics (`openclaw_rl.offline.personas`); relevance, fluency and KL stand beside the score
(`learning/measures.py`), as do prompts near the wish and elsewhere (`learning/scope_measures.py`). In the study `drift`
the user then goes on to complain and to thank, and all is measured once more. The arms are in `learning/arms.py`, the
studies in `learning/studies.py`.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from benchmarks.learning.practice_plot import plot
from benchmarks.learning.practice_report import load, write_report
from benchmarks.learning.scope_measures import Line
from benchmarks.learning.studies import STUDIES, Place, ends_jobs, jobs_of, smoke, work
from openclaw_rl.models import resolve
from openclaw_rl.offline.personas import PREFERENCES, ExperimentError
from openclaw_rl.offline.problems import problems
from openclaw_rl.settings import ModelSettings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", choices=sorted(STUDIES), default="final")
    parser.add_argument("--smoke", action="store_true", help="every part of the studies in little")
    parser.add_argument("--arms", nargs="+", default=None, help="names of arms; default: all of the studies")
    parser.add_argument("--preferences", nargs="+", choices=sorted(PREFERENCES), default=list(PREFERENCES))
    parser.add_argument("--seeds", nargs="+", type=int, default=None)
    parser.add_argument("--no-ends", action="store_true", help="do not measure the base again")
    parser.add_argument(
        "--problems",
        default=None,
        help="word problems that are asked elsewhere: a JSON file, a folder, or a hub's NAME",
    )
    parser.add_argument("--workers", type=int, default=None, help="processes; default: 7 on a GPU, else 1")
    parser.add_argument("--group", type=int, default=15, help="runs that a worker trains in step")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which no work begins")
    parser.add_argument("--threads", type=int, default=None, help="threads of each worker")
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this host that the workers are spread over")
    parser.add_argument("--model", default="bundled", help="`bundled`, a folder, a .gguf file (a Llama model)")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/openclaw-rl").expanduser())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default=None, help="name of the results; default: the studies")
    parser.add_argument("--report", nargs="+", type=Path, default=None, help="only report these .jsonl files")
    args = parser.parse_args()
    name = f"learning_practice-{args.name or args.studies}"
    if args.report:
        _written(load(args.report), args.out / name, {})
        return 0
    started = time.time()
    studies = [
        replace(
            study,
            arms=tuple(arm for arm in study.arms if args.arms is None or arm.name in args.arms),
            wishes=tuple(
                chosen for wishes in study.wishes if (chosen := tuple(w for w in wishes if w in args.preferences))
            ),
            seeds=tuple(args.seeds) if args.seeds else study.seeds,
        )
        for study in STUDIES[args.studies]
    ]
    if args.smoke:
        studies = [smoke(study) for study in studies]
    try:
        most = max(study.sizes.problems for study in studies)
        posed = problems(args.problems, most) if args.problems else ()
    except ExperimentError as refused:
        parser.error(f"--problems: {refused}")
    model = ModelSettings(path=args.model)
    resolve.base_hash(resolve.resolve(model, args.cache))  # convert the model once, before the workers race for it
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / f"{name}.jsonl"
    results.write_text("")
    is_cpu = args.device == "cpu"
    threads = args.threads or ((os.cpu_count() or 1) if is_cpu else 2)
    place = Place(model, args.cache, args.device, threads, results, posed)
    jobs = jobs_of(studies[:2], place, args.group)
    if not args.no_ends:
        named = sorted({wish for wishes in studies[0].wishes for wish in wishes})
        jobs += ends_jobs(named, studies[0].seeds, place, studies[0].sizes)
    jobs += jobs_of(studies[2:], place, args.group)
    print(f"{sum(len(job.runs) for job in jobs)} runs in {len(jobs)} jobs on {args.device}", flush=True)
    workers = args.workers or (1 if is_cpu else 7 * args.gpus)
    left_out = failed = 0
    context = multiprocessing.get_context("spawn")
    number = context.Value("i", 0)
    with ProcessPoolExecutor(workers, context, _take_gpu, (number, args.gpus)) as pool:
        for job, done in [(job, pool.submit(work, job, started + args.seconds)) for job in jobs]:
            if error := done.exception():
                failed += 1
                print(f"a job failed: {job.ends_of or [arm.name for arm, _, _ in job.runs]}: {error!r}", flush=True)
            elif not done.result():
                left_out += len(job.runs)
    about = {
        "model": resolve.model_display_name(model),
        "device": _device_name(args.device),
        "sizes": str(studies[0].sizes),
        "seconds": round(time.time() - started),
        "runs that the time did not allow": left_out,
    }
    _written(load([results]), args.out / name, about)
    print(f"{about['seconds']} s → {results}")
    return 1 if failed else 0


def _take_gpu(number: Synchronized, gpus: int) -> None:
    """Give this worker one of the GPUs, each in turn, before it initialises CUDA."""
    if gpus > 1:
        with number.get_lock():
            os.environ["CUDA_VISIBLE_DEVICES"] = str(number.value % gpus)
            number.value += 1


def _written(lines: Sequence[Line], out: Path, about: Mapping[str, object]) -> None:
    """Write the table and the curves; print the table."""
    print(write_report(lines, out, about))
    if not plot(lines, out):
        print("no curves: no run of one wish alone, or no matplotlib (the extra `dev` has it)")


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"{os.cpu_count()} CPU cores"
    import torch

    return str(torch.cuda.get_device_name())


if __name__ == "__main__":
    raise SystemExit(main())
