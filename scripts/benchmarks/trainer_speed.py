"""Speed and memory of the trainer's step, beside a plain torch + PEFT step on the same samples, in one run.

    scripts/benchmarks.sh trainer_speed --preset gpu    one GPU, under five minutes: 0.6B and 4B shapes, random weights
    scripts/benchmarks.sh trainer_speed --preset cpu    a tiny model on the CPU, seconds: shows that it runs, no figures

The sections are: equal lengths (aim: at least 0.9 of the plain step's tokens a second); mixed lengths (aim: twice
padded batches); log-probs of packed rows against fp32 ones; full weights; quantised bases; and the longest sample that
trains while the allocator may hold 24 or 80 GiB. Quantised bases need bitsandbytes. `--folder NAME=PATH` names a
checkpoint of a shape; without one they use the checkpoint that `full weights` wrote. A row is written to the results as
soon as it is known. A section for which `--seconds` leaves no time is skipped, and the output names it.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.trainer.clock import Deadline, free
from benchmarks.trainer.sections import Row, exactness, full_weights, largest_context, quantised, speed
from benchmarks.trainer.subjects import SHAPES, mixed_lengths
from openclaw_rl.settings import TrainerSettings

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    seconds: float
    """Longest known time; the section is skipped if less is left."""
    run: Callable[[Deadline], Row]


def gpu_sections(folders: dict[str, Path], scratch: Path) -> list[Section]:
    small, large = SHAPES["0.6b"], SHAPES["4b"]
    settings = TrainerSettings(device="cuda", micro_batch_tokens=8192, max_tokens=131072, learning_rate=1e-4)
    narrow = settings.model_copy(update={"micro_batch_tokens": 4096})
    written = scratch / "full"

    def bits(quantise: str) -> TrainerSettings:
        return settings.model_copy(update={"quantise": quantise})

    def context(shape: str, cap: float, longest: int) -> Callable[[Deadline], Row]:
        return lambda deadline: largest_context(SHAPES[shape], settings, cap, deadline, longest)

    sections = [
        Section("exactness 0.6b", 15, lambda _: exactness(small, settings, mixed_lengths(8, 64, 1024))),
        Section("equal 0.6b", 30, lambda _: speed(small, settings, [1024] * 16, times=3, label="equal")),
        Section(
            "mixed 0.6b", 40, lambda _: speed(small, settings, mixed_lengths(32, 64, 4096), times=2, label="mixed")
        ),
        Section("equal 4b", 40, lambda _: speed(large, narrow, [1024] * 16, times=2, label="equal")),
        Section("24 GiB 4b", 25, context("4b", 24, 65536)),
        Section("24 GiB 0.6b", 25, context("0.6b", 24, 131072)),
        Section("full 0.6b", 25, lambda _: full_weights(small, settings, [512] * 16, written)),
        Section("4bit 0.6b", 20, lambda _: quantised(small, bits("4bit"), [512] * 16, folders.get("0.6b", written))),
        Section("8bit 0.6b", 20, lambda _: quantised(small, bits("8bit"), [512] * 16, folders.get("0.6b", written))),
        Section("80 GiB 0.6b", 30, context("0.6b", 80, 131072)),
        Section("80 GiB 4b", 40, context("4b", 80, 65536)),
        Section("mixed 4b", 40, lambda _: speed(large, narrow, mixed_lengths(16, 64, 4096), times=1, label="mixed")),
    ]
    if "4b" in folders:
        sections.insert(9, Section("4bit 4b", 30, lambda _: quantised(large, bits("4bit"), [512] * 16, folders["4b"])))
    return sections


def cpu_sections(folders: dict[str, Path], scratch: Path) -> list[Section]:
    tiny = SHAPES["tiny"]
    settings = TrainerSettings(rank=4, alpha=8, packing="on", micro_batch_tokens=256, max_tokens=512)
    lengths = mixed_lengths(6, 8, 128)
    return [
        Section("exactness", 5, lambda _: exactness(tiny, settings, lengths)),
        Section("equal", 5, lambda _: speed(tiny, settings, [64] * 4, times=1, label="equal")),
        Section("mixed", 5, lambda _: speed(tiny, settings, lengths, times=1, label="mixed")),
        Section("full", 5, lambda _: full_weights(tiny, settings, lengths, scratch / "full")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=["gpu", "cpu"], default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=270.0, help="time limit of all sections together")
    parser.add_argument("--only", default="", help="sections whose names hold one of these: `equal,mixed 0.6b`")
    parser.add_argument("--folder", action="append", default=[], metavar="NAME=PATH")
    arguments = parser.parse_args()
    deadline = Deadline(arguments.seconds)
    device = torch.cuda.get_device_name(0) if arguments.preset == "gpu" else platform.machine()
    about = {"section": "about", "device": device, "torch": torch.__version__, "seconds": arguments.seconds}
    folders = {name: Path(path) for name, _, path in (item.partition("=") for item in arguments.folder)}
    folders = {name: path for name, path in folders.items() if path.is_dir()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (
        (arguments.out / f"trainer_speed-{arguments.preset}.jsonl").open("w") as results,
        tempfile.TemporaryDirectory() as scratch,
    ):

        def tell(row: Row) -> None:
            line = json.dumps({k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()})
            results.write(line + "\n")
            results.flush()
            print(line, flush=True)

        tell(about)
        make = gpu_sections if arguments.preset == "gpu" else cpu_sections
        for section in make(folders, Path(scratch)):
            if not any(part in section.name for part in arguments.only.split(",")):
                continue
            if deadline.left_s < section.seconds:
                tell({"section": section.name, "left_out": f"{deadline.left_s:.0f} s were left"})
                continue
            started = time.monotonic()
            try:
                row = section.run(deadline)
            except (RuntimeError, OSError, ValueError, AttributeError, AssertionError, TypeError) as error:
                row = {"section": section.name, "failed": f"{type(error).__name__}: {error}"[:600]}
                free("cuda" if arguments.preset == "gpu" else "cpu")
            tell(row | {"took_s": time.monotonic() - started})


if __name__ == "__main__":
    main()
