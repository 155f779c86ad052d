"""The demonstration of the first hour, on the real server with a cut model: corrections, practice, new questions."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVE = """#!/bin/sh
exec {python} -m openclaw_rl serve --model {model} --method opd --set practice.idle_s=0 --set practice.replies=2 \\
  --set practice.max_updates=1 --set engine.threads=1 --set sampling.max_new_tokens=8 --set practice.max_tokens=8 "$@"
"""


def test_four_corrections_are_practised_and_new_questions_are_asked_before_and_after(short_model: Path, tmp_path: Path):
    launch = tmp_path / "serve.sh"
    launch.write_text(SERVE.format(python=sys.executable, model=short_model))
    launch.chmod(0o755)
    argv = [sys.executable, str(ROOT / "scripts" / "demo_chat.py"), str(launch), "--minutes", "9"]
    environ = os.environ | {"PYTHONSAFEPATH": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    talk, _, rest = done.stdout.partition("… the user goes away")
    practice, _, after = rest.partition("New questions")
    assert talk.count("  user:     ") == 4
    assert "practising" in practice
    assert after.count("user:       ") == 5
    assert after.count("  version 0: ") >= 5
    assert not list(tmp_path.glob("openclaw-demo-*")), "the data folder goes with the demonstration"
