"""The experiment of personalization over methods, people and seeds, each on a fresh real server of its own.

    scripts/e2e.sh personalization FOLDER [--arms opd combine …] [--people short no_lists] [--seeds 0 1 2]
        [--idle-minutes 10] [--out scripts/benchmarks/results/personalization-cpu] [any flag of `openclaw-rl serve`]

An arm is a set of server flags (`ARMS`). For each arm, person and seed this script starts a server with a data folder
in FOLDER, lets `openclaw-rl experiment personalization` correct it, and stops it. All results stand in one table, one
picture and one JSON file, which is written after each run. A run that is in the file already is left out, so that a
stopped comparison goes on.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from openclaw_rl.offline import personalization
from openclaw_rl.offline.personas import PREFERENCES
from openclaw_rl.testing.running_server import RunningServer

NO_PRACTICE = ("--set", "practice.enabled=false")
ARMS: dict[str, tuple[str, ...]] = {
    "binary": ("--method", "binary_rl"),
    "opd": ("--method", "opd"),
    "opd, no practice": ("--method", "opd", *NO_PRACTICE),
    "opd, no guidance": ("--method", "opd", "--set", "method.guidance=0"),
    "combine": ("--method", "combine"),
    "combine, no practice": ("--method", "combine", *NO_PRACTICE),
}
"""Server flags of each arm; the judge and all else are the defaults, or flags of the command line."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=["opd"])
    parser.add_argument("--people", nargs="+", choices=sorted(PREFERENCES), default=["short"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--corrections", type=int, default=4)
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--idle-minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("personalization"))
    options, flags = parser.parse_known_args()
    failed = 0
    for seed in options.seeds:
        for person in options.people:
            for arm in options.arms:
                if not _is_done(options.out, arm, person, seed):
                    failed += _run(options, flags, arm, person, seed)
    return 1 if failed else 0


def _is_done(out: Path, arm: str, person: str, seed: int) -> bool:
    file = out.with_suffix(".json")
    known = personalization.load([file]) if file.exists() else []
    return any((one.method, one.person, one.seed) == (arm, person, seed) for one in known)


def _run(options: argparse.Namespace, flags: list[str], arm: str, person: str, seed: int) -> bool:
    """Run one experiment; return True if it failed."""
    print(f"== {arm}, {person}, seed {seed}", flush=True)
    data_dir = options.folder.absolute() / f"{arm}-{person}-{seed}".replace(", ", "-").replace(" ", "-")
    shutil.rmtree(data_dir, ignore_errors=True)
    with RunningServer(data_dir, [*ARMS[arm], *flags]) as server:
        asked = {
            "--person": person,
            "--seed": seed,
            "--method": arm,
            "--url": server.url,
            "--data-dir": data_dir,
            "--out": options.out.absolute(),
            "--corrections": options.corrections,
            "--held-out": options.held_out,
            "--max-tokens": options.max_tokens,
            "--idle-minutes": options.idle_minutes,
        }
        words = [str(word) for pair in asked.items() for word in pair]
        command = [sys.executable, "-m", "openclaw_rl", "experiment", "personalization", *words]
        return subprocess.run(command, check=False).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
