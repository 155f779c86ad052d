"""The name under which scripts of before convert the bundled model."""

import subprocess
import sys
from pathlib import Path


def test_it_prints_the_folder_of_the_converted_model(bundled_cache: Path):
    argv = [sys.executable, "-m", "openclaw_rl.engines.bundled", "--cache", str(bundled_cache)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=550, check=True)
    folder = Path(done.stdout.strip().splitlines()[-1])
    assert folder.is_relative_to(bundled_cache)
    assert (folder / "model.safetensors").exists()
