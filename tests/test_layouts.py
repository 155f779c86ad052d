"""Layouts in `instructions/`: each is a configuration that starts and assigns each GPU once."""

import itertools
import re
from pathlib import Path

import pytest

from openclaw_rl.engines.sglang import launch
from openclaw_rl.settings import load

LAYOUTS = Path(__file__).parents[1] / "instructions" / "layouts"
INSTALLED = launch.Installed("0.5.15.post1", frozenset({"incremental_streaming_output"}), True, True)


def taken(words: list[str]) -> set[int]:
    """Return the GPUs that an SGLang with this command line takes."""
    flags = dict(itertools.pairwise(words))
    first = int(flags.get("--base-gpu-id", 0))
    return set(range(first, first + int(flags.get("--tp", 1))))


@pytest.mark.parametrize("file", sorted(LAYOUTS.glob("*.toml")), ids=lambda file: file.stem)
def test_a_layout_is_read_and_no_gpu_is_given_away_twice(file: Path) -> None:
    settings, gpus = load(file, {}, {}), int(file.stem.split("-")[0])
    adapters = launch.Adapters.of(settings.trainer, settings.publisher, settings.policies)
    argv = launch.argv(
        INSTALLED, settings.engine, folder=Path("m"), name="m", port=1, context_length=None, adapters=adapters
    )
    uses = [taken(argv), {int(settings.trainer.device.partition(":")[2])}]
    started = re.search(r"^#   .*launch_server (.*)$", file.read_text(), re.MULTILINE)
    assert (started is None) == (settings.judge.url is None) == (settings.method.teacher_url is None)
    if started is not None:
        words = started[1].split()
        uses.append(taken(words))
        assert words[words.index("--model-path") + 1] == settings.model.path
        port = words[words.index("--port") + 1]
        assert settings.judge.url == f"http://127.0.0.1:{port}/v1"
        assert settings.method.teacher_url == f"http://127.0.0.1:{port}"
    assert set.union(*uses) <= set(range(gpus))
    if gpus > 1:
        assert sum(map(len, uses)) == len(set.union(*uses))


def test_there_is_a_layout_for_each_machine_and_the_page_names_it() -> None:
    names = {file.name for file in LAYOUTS.glob("*.toml")}
    assert names == {"1-gpu.toml", "2-gpus.toml", "4-gpus.toml", "8-gpus.toml"}
    page = (LAYOUTS.parent / "gpu-layouts.md").read_text()
    assert all(f"layouts/{name}" in page for name in names)
