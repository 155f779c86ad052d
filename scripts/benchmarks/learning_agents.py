"""Learning of agents: pass rates on held-out tasks by training step, with the real server and the real runner.

    scripts/benchmarks.sh learning_agents                                # the four miniatures, one after the other, CPU
    scripts/benchmarks.sh learning_agents --tasks toolcall_mini --steps 0 2 4 --evaluate 96
    scripts/benchmarks.sh learning_agents --seeds 0 1 2 --at-once 12 --device cuda --seconds 540 --out NAME
    scripts/benchmarks.sh learning_agents --tasks terminal_find --credit both outcome process grpo
    scripts/benchmarks.sh learning_agents --tasks swe_mini --also trainer.kl_coef=0.03 "options.show_test=true"

Each run has a server of its own (the bundled model, method `agent`, its defaults) and a runner of its own. After each
number of training steps the runner has stopped, the trainer has taken what waits, and the held-out tasks are played at
temperature 1; at the first and the last reading without chance, too. Their names are in no training task. A step takes
8 groups of 8 episodes whose outcomes differ; groups that all pass or all fail are played, too, and teach nothing. A
run's data stay in a temporary folder.

Credit: `outcome` is the outcome alone, and no judge is asked. `process` is the judge's votes alone, by rules. `both`
is their sum, the method's default. `grpo` compares outcomes and ignores votes. `--also` repeats each run with other
settings of the server, or, as `options.NAME`, of the environment.

Every reading is a line of OUT.jsonl at once. OUT.md has the table, and OUT.svg the curves.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

from openclaw_rl.agents.journal import Records
from openclaw_rl.testing.running_server import RunningServer

MINIATURES = {"terminal_mini": 32, "swe_mini": 64, "toolcall_mini": 32, "gui_mini": 32, "terminal_find": 32}
"""Each environment's longest reply, in tokens."""
CREDITS = {
    "both": {},
    "outcome": {"method.process_weight": "0"},
    "process": {"method.outcome_weight": "0"},
    "grpo": {"method.estimator": "grpo", "method.process_weight": "0"},
}
_OPTION = "options."
AIMS = {"terminal_mini": 0.6, "swe_mini": 0.85, "toolcall_mini": 0.9, "gui_mini": 0.8}
MOST_PLAYED = 3
"""Groups that are played for each that a step takes, at most: of a task that is learned few differ."""
GROUPS, SIZE, SETTLE_S, QUIET_S = 8, 8, 300.0, 2.0
"""Groups of a step, episodes of a group, patience with the last step of a stage, and the silence that ends a stage."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One evaluation of one run."""

    tasks: str
    credit: str
    """A key of CREDITS; after a comma, what else was set."""
    seed: int
    steps: int
    """Training steps so far; a batch without contrast makes none."""
    groups: int
    seconds: float
    """Since the run's start, evaluations before this one left out."""
    passed: float
    low: float
    high: float
    held_out: int
    kinds: dict[str, float]
    greedy: float | None = None
    """Pass rate at temperature 0."""


class Run:
    """One server and its runner, stage by stage."""

    def __init__(self, tasks: str, credit: str, seed: int, folder: Path, options: argparse.Namespace) -> None:
        self.tasks, self.credit, self.seed = tasks, credit, seed
        self._folder, self._options = folder, options
        how, _, changed = credit.partition(", ")
        changes = dict(pair.split("=", 1) for pair in changed.split())
        self._settings = CREDITS[how] | {key: value for key, value in changes.items() if not key.startswith(_OPTION)}
        own = {key.removeprefix(_OPTION): value for key, value in changes.items() if key.startswith(_OPTION)}
        self._environment = "".join(f"{key} = {value}\n" for key, value in own.items())
        folder.mkdir(parents=True, mode=0o755)
        self._evaluating_s, self._groups = 0.0, 0

    def readings(self, end: float) -> Iterator[Reading]:
        """Play and train until the last stage, or until the monotonic time `end`. Raises RuntimeError."""
        began, device = time.monotonic(), self._options.device
        chosen = {
            "method.name": "agent",
            "judge.kind": "rules",
            "episodes.groups_per_step": str(GROUPS),
            "episodes.max_groups_ahead": str(2 * GROUPS),
            "trainer.seed": str(self.seed),
            "engine.device": device,
            "trainer.device": device,
            "trainer.dtype": "float32",  # the embedded engine's: samples stay exact on a GPU, too
            "engine.max_running": "64",
            **({"trainer.micro_batch_tokens": "2048"} if device == "cuda" else {}),  # several runs share its memory
            **self._settings,
        }
        flags = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
        with RunningServer(self._folder / "data", flags) as server:
            for stage in self._options.steps:
                most = MOST_PLAYED * GROUPS * stage
                while (made := server.status()["tip"] or 0) < stage and self._groups < most and time.monotonic() < end:
                    self._groups = min(most, self._groups + GROUPS * (stage - made))
                    self._act(server, "run", end)
                    self._settle(server, end)
                if time.monotonic() > end:
                    return
                before = time.monotonic()
                trained_s = before - began - self._evaluating_s
                greedy = None
                if stage in (self._options.steps[0], self._options.steps[-1]):
                    self._act(server, "eval", end, temperature=0.0)
                    greedy = self._evaluation()["pass@1"]
                self._act(server, "eval", end)
                self._evaluating_s += time.monotonic() - before
                yield self._reading(server, trained_s, greedy)

    def _act(self, server: RunningServer, verb: str, end: float, temperature: float = 1.0) -> None:
        plan, log = self._folder / "plan.toml", self._folder / "runner.log"
        plan.write_text(
            f'environment = "{self.tasks}"\nfolder = "run"\nserver = "{server.url}"\nseed = {self.seed}\n'
            f"sampling = {{ temperature = 1.0, max_tokens = {MINIATURES[self.tasks]} }}\n"
            f"[options]\nseed = {self.seed}\n{self._environment}[train]\ngroups = {self._groups}\ngroup_size = {SIZE}\n"
            f"concurrency = 64\n[limits]\nact_s = 300.0\n[eval]\ntasks = {self._options.evaluate}\nconcurrency = 64\n"
            f"sampling = {{ temperature = {temperature} }}\n"
        )
        argv = [sys.executable, "-m", "openclaw_rl", "agents", verb, str(plan)]
        with log.open("ab") as out:
            runner = subprocess.Popen(argv, stdout=out, stderr=out, env=os.environ | {"PYTHONSAFEPATH": "1"})
        try:
            if runner.wait(max(1.0, end - time.monotonic())):
                raise RuntimeError(f"{self.tasks}, seed {self.seed}: {log.read_text()[-2000:]}")
        except subprocess.TimeoutExpired:
            runner.terminate()
            runner.wait(120)

    def _settle(self, server: RunningServer, end: float) -> None:
        """Wait until nothing is trained, gated or swapped any more; what is less than a batch stays."""
        end, quiet = min(end, time.monotonic() + SETTLE_S), time.monotonic()
        while time.monotonic() < min(end, quiet + QUIET_S):
            now = server.status()
            waits = now["counts"].get("paired", 0) + now["counts"].get("leased", 0)
            if waits or now["serving"] != now["tip"]:
                quiet = time.monotonic()
            time.sleep(0.25)

    def _evaluation(self) -> Any:
        return Records.of_folder(self._folder / "run", self.tasks).evaluations[-1]

    def _reading(self, server: RunningServer, seconds: float, greedy: float | None) -> Reading:
        records, found = Records.of_folder(self._folder / "run", self.tasks), self._evaluation()
        return Reading(
            tasks=self.tasks,
            credit=self.credit,
            seed=self.seed,
            steps=server.status()["tip"] or 0,
            groups=sum(group.is_whole for group in records.of_split("train")),
            seconds=round(seconds, 1),
            passed=round(found["pass@1"], 4),
            low=round(found["low"], 4),
            high=round(found["high"], 4),
            held_out=found["tasks"],
            kinds={kind: round(rate, 3) for kind, rate in found.get("kinds", {}).items()},
            greedy=greedy,
        )


def read(file: Path) -> list[Reading]:
    """Return the readings of a file, of each run those of the last time; none without a file."""
    found: dict[tuple[str, str, int], list[Reading]] = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        if "tasks" in (fields := json.loads(line)):
            one = Reading(**fields)
            run = found.setdefault((one.tasks, one.credit, one.seed), [])
            if run and one.steps <= run[-1].steps:  # it was played again
                run.clear()
            run.append(one)
    return [one for run in found.values() for one in run]


def table(readings: Sequence[Reading]) -> str:
    """Return the table: each run's pass rate at each reading, and the mean of the seeds at the last one."""
    lines = ["| tasks | credit | seed | steps: pass rate | last | without chance | aim |", "| --- |" + " --- |" * 6]
    for name, credit in dict.fromkeys((one.tasks, one.credit) for one in readings):
        own = [one for one in readings if (one.tasks, one.credit) == (name, credit)]
        aim = f"{AIMS[name]:.2f}" if name in AIMS else "–"
        lasts = []
        for seed in sorted({one.seed for one in own}):
            run = [one for one in own if one.seed == seed]
            lasts += [run[-1].passed] if run[-1].steps else []
            curve = ", ".join(f"{one.steps}: {one.passed:.2f}" for one in run)
            last = f"{run[-1].passed:.2f} [{run[-1].low:.2f}, {run[-1].high:.2f}], {run[-1].seconds:.0f} s"
            greedy = " → ".join(f"{one.greedy:.2f}" for one in run if one.greedy is not None)
            lines.append(f"| `{name}` | {credit} | {seed} | {curve} | {last} | {greedy} | {aim} |")
        if lasts:  # of the runs that trained
            lines.append(f"| `{name}` | {credit} | mean of {len(lasts)} | | **{fmean(lasts):.2f}** | | {aim} |")
    return "\n".join(lines)


def plot(readings: Sequence[Reading], out: Path) -> None:
    """Draw one panel for each environment: pass rate by training step, a line for each run."""
    from matplotlib.figure import Figure

    names, credits = (list(dict.fromkeys(getattr(one, key) for one in readings)) for key in ("tasks", "credit"))
    figure = Figure((3.6 * len(names), 3.4), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        for credit, seed in dict.fromkeys((one.credit, one.seed) for one in readings if one.tasks == name):
            run = [one for one in readings if (one.tasks, one.credit, one.seed) == (name, credit, seed)]
            style = {"color": f"C{credits.index(credit)}", "label": credit}
            panel.plot([one.steps for one in run], [one.passed for one in run], marker="o", markersize=3, **style)
        if name in AIMS:
            panel.axhline(AIMS[name], linestyle=":", color="grey")
        panel.set(title=name, xlabel="training step", ylim=(0, 1))
    panels[0].set_ylabel("pass rate of held-out tasks")
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), fontsize="small")
    figure.savefig(out.with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=MINIATURES, default=list(AIMS))
    parser.add_argument("--credit", nargs="+", choices=CREDITS, default=["outcome"])
    parser.add_argument(
        "--also", nargs="+", default=[], metavar="'KEY=VALUE …'", help="repeat each run with these settings"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--steps", nargs="+", type=int, default=[0, 5, 10, 20, 30], help="batches of 8 × 8 at a reading"
    )
    parser.add_argument("--evaluate", type=int, default=200, help="held-out tasks")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=6 * 3600.0, help="end by then, with what there is")
    parser.add_argument("--add", action="store_true", help="keep what OUT.jsonl has of other runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "learning_agents")
    options = parser.parse_args()
    lines = options.out.with_suffix(".jsonl")
    arms = [", ".join(filter(None, (credit, also))) for credit in options.credit for also in ("", *options.also)]
    played = [(tasks, arm, seed) for seed in options.seeds for tasks in options.tasks for arm in arms]
    end, lock = time.monotonic() + options.seconds, Lock()
    readings = [one for one in read(lines) if (one.tasks, one.credit, one.seed) not in played] if options.add else []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "device": options.device, "python": platform.python_version()}
    with lines.open("a" if options.add else "w") as file, tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"machine": machine, "at_once": options.at_once}), file=file, flush=True)

        def play(tasks: str, credit: str, seed: int) -> None:
            run = Run(tasks, credit, seed, Path(folder) / f"{tasks}-{arms.index(credit)}-{seed}", options)
            for reading in run.readings(end):
                with lock:
                    readings.append(reading)
                    print(json.dumps(asdict(reading)), file=file, flush=True)
                    print(
                        f"{tasks}, {credit}, seed {seed}: {reading.passed:.2f} after {reading.steps} steps, "
                        f"{reading.seconds:.0f} s",
                        flush=True,
                    )

        with ThreadPoolExecutor(options.at_once) as pool:
            runs = [pool.submit(play, *one) for one in played]
        failed = [error for run in runs if (error := run.exception())]
    told = table(sorted(readings, key=lambda one: one.steps))
    options.out.with_suffix(".md").write_text(told + "\n")
    print(told)
    if readings:
        plot(sorted(readings, key=lambda one: one.steps), options.out)
    if failed:
        raise SystemExit("\n".join(f"{error!r}" for error in failed))


if __name__ == "__main__":
    main()
