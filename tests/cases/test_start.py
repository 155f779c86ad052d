"""Cases CL-1 and CL-2 as the cases have them: the command line itself, and the remains of a failed start."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.cases import CASES
from harness.checks import failures
from harness.model import make_folder

STARTED_IN = "OPENCLAW_CASE"
"""A variable that a server's children inherit."""


def serve(folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """One start that should fail. `elapsed_s` is its own time on a CPU: a busy machine is not its fault."""
    argv = [sys.executable, "-m", "openclaw_rl", "serve", "--data-dir", str(folder), *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    mark = {STARTED_IN: str(folder)}
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=os.environ | mark)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "exit_code": ended.returncode,
        "elapsed_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "stderr": ended.stderr,
        "log": ended.stderr,
        "children_left": sum(f"{STARTED_IN}={folder}" in environ for environ in _environments()),
    }


def _environments() -> list[str]:
    """Return the environment of every process that can be read."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            found.append(file.read_bytes().decode(errors="replace"))
        except OSError:  # gone, or somebody else's
            continue
    return found


def test_a_wrong_path_port_and_gpu_count_are_named_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["--port", port, "--model", "/no/such/model", "--engine", "sglang"]
        proc = serve(tmp_path / "data", [*words, "--set", "engine.args=" + json.dumps(["--tp", "9"])])
    assert failures(CASES["CL-1"]["expect"]["checks"], {"proc": proc}, said={}) == []
    lines = proc["stderr"].strip().split("\n")
    assert len(lines) == 3, proc["stderr"]
    for line, setting in zip(lines, ("server.port", "model.path", "engine.args"), strict=True):
        assert line.startswith(f"openclaw-rl: {setting}")
    assert not (tmp_path / "data").exists()  # nothing was started


def test_without_a_chat_template_the_start_is_refused_with_advice(tmp_path: Path) -> None:
    """The case's other half, an engine with another template, cannot happen: an engine gets ids, and never uses its own
    template. Another template of our own is another ledger (`test_frontend.py`)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = tmp_path / "model"
    config = LlamaConfig(
        vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(model)
    make_folder(model)
    (model / "config.json").write_text(json.dumps(config.to_dict()))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    words = ["--port", "0", "--model", str(model), "--engine", "url", "--set", "engine.url=http://127.0.0.1:9"]
    proc = serve(tmp_path / "data", [*words, "--set", "trainer.kind=external"])
    checks = [check for check in CASES["CL-2"]["expect"]["checks"] if check["at"].startswith("proc.")]
    assert len(checks) == 2
    assert failures(checks, {"proc": proc}, said={}) == []
    assert "model.chat_template" in proc["stderr"]
    assert ("Traceback" in proc["stderr"], proc["children_left"]) == (False, 0)
