"""Time from nothing to the first reply: `git clone` of this checkout, `scripts/serve.sh`, one short chat.

    scripts/benchmarks.sh fresh_start [--folder FOLDER] [--out FILE.json]

pip takes the packages from its cache, so run it once before a run that counts. The clone has the last commit, not the
changes beside it. It lies in a new folder below FOLDER with its virtual environment, about 3 GB, deleted at the end.
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path

import httpx

from openclaw_rl.testing.running_server import RunningServer

ROOT = Path(__file__).parents[2]
PATIENCE_S = 1800.0
OURS = ("VIRTUAL_ENV", "PYTHONPATH", "OPENCLAW_RL_VENV")
"""Variables of this interpreter's environment, which the clone must not find."""


def measure(folder: Path) -> dict[str, object]:
    """Return the seconds from the begin of the clone to the marks on the way. Raises RuntimeError."""
    began, clone = time.time(), folder / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=PATIENCE_S)
    marks = {"cloned": time.time()}
    launch = ["env", *(word for name in OURS for word in ("-u", name)), str(clone / "scripts" / "serve.sh")]
    with RunningServer(folder / "data", start_s=PATIENCE_S, launch=launch) as server:
        marks["installed"] = next((clone / ".venv").glob(".openclaw-rl-*")).stat().st_mtime
        marks["ready"] = time.time()
        body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
        marks["first reply"] = time.time()
    return {
        "from the start, s": {name: round(at - began, 1) for name, at in marks.items()},
        "reply": reply["choices"][0]["message"]["content"],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="default: the temporary folder of this machine")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(Path(folder))
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
