"""Stages `practice_opd` and `practice_combine`: the guided teacher and practice on a whole server of its own.

A user corrects a few replies and goes away. The server practises, and its versions serve. Then chats meet practice.
Afterwards the teacher's log-probs of the ledger are compared with plain forward passes (`guided_teacher`).
"""

import json
import time
from pathlib import Path

from gpu import guided_teacher, load, practice_load
from gpu.host import SglangHost
from gpu.latency import wait_for_trainer
from gpu.server_files import audit, keep_logs, set_flags
from gpu.stages import Figures
from openclaw_rl.testing.running_server import RunningServer

UPDATES = 3
OF_EACH = 8
"""Compared samples of each version; half as many anchors and users' turns."""
TOKENS, TINY_TOKENS = 96, 12
RANDOM_RATE = 3e-3
TRAINER_S = 120.0
PRACTISED_S, MET_S = 90.0, 40.0
"""Longest times: until three practised versions serve; until enough chats have met practice."""


def run(host: SglangHost, data_dir: Path, method: str, *, top_k: int) -> Figures:
    name = f"practice_{method}"
    slow = 5.0 if host.device == "cpu" else 1.0
    started = time.monotonic()
    figures: Figures = {"method": method, "top_k": top_k, "model": host.model.name}
    server = RunningServer(data_dir, _flags(host, method, top_k), start_s=280)
    try:
        with server:
            figures["start_s"] = round(time.monotonic() - started, 1)
            wait_for_trainer(data_dir / "logs" / "trainer.log", TRAINER_S * slow)
            figures["trainer ready_s"] = round(time.monotonic() - started, 1)
            practice_load.correct(server, max_tokens=TINY_TOKENS if host.is_tiny else TOKENS)
            progress = practice_load.practised(server, updates=UPDATES, timeout_s=PRACTISED_S * slow)
            figures |= progress.figures()
            host.so_far(name, figures)
            figures["chats that meet practice"] = met = practice_load.latency(server, MET_S * slow)
            records = server.turns(practice_load.NEWEST)
            figures["marks"] = marked = practice_load.marks(server, records, host.out)
            status = server.status()
            figures["versions"] = {row["weight_version"]: row["state"] for row in status["versions"]}
            figures["problems"] = status["problems"]
            figures["counts"] = {key: n for key, n in status["counts"].items() if "practice" in key}
            host.so_far(name, figures)
            folders = {row["weight_version"]: row["folder"] for row in status["versions"] if row["folder"]}
        known = {version: data_dir / folder for version, folder in folders.items()}
        figures["teacher"] = compared = _compared(host, records, known)
        found = audit(data_dir)
        must_learn = not (host.has_random_weights and top_k)
        findings = [
            *progress.findings(UPDATES, must_learn=must_learn),
            *met["findings"],
            *marked["findings"],
            *compared["findings"],
        ]
        findings += [f"audit: {one}" for one in found] + [f"problem: {one}" for one in status["problems"]]
        return figures | {"findings": findings}
    finally:
        keep_logs(data_dir, host.out, name)


def _flags(host: SglangHost, method: str, top_k: int) -> list[str]:
    settings = [*load.SETTINGS, *practice_load.SETTINGS, f"method.top_k={top_k}", f'trainer.device="{host.device}"']
    settings += ["publisher.self_test_tolerance=0.3", "training.batch_size=16"]
    settings += ["practice.max_tokens=12", "practice.replies=6", "trainer.nice=0"] if host.is_tiny else []
    if host.has_random_weights:  # a few steps must move them further than bfloat16's noise
        settings += ["practice.least_relevance=0", f"trainer.learning_rate={RANDOM_RATE}"]
    flags = ["--model", str(host.model), "--judge", "rules", "--method", method, "--engine", host.engine]
    if host.engine == "sglang":
        settings += ["model.context_length=4096", f'engine.python="{host.engine_python}"']
        settings += ["engine.memory_fraction=0.3", f"engine.args={json.dumps(host.engine_args)}"]
    return [*flags, *set_flags(settings)]


def _compared(host: SglangHost, records: list[Figures], adapters: dict[int, Path]) -> Figures:
    """Compare samples that were scored under the base, and under the newest version that has some."""
    scored = sorted(
        {row["sample"]["scored_version"] for row in records if row["practice"] == "wish" and row["sample"] is not None}
    )
    newest = [version for version in scored if version in adapters][-1:]
    rows = practice_load.chosen(records, [0, *newest], of_each=OF_EACH)
    samples = [guided_teacher.taught(row, host.model, practice_load.READING) for row in rows]
    return guided_teacher.compare(
        [one for one in samples if one is not None], host.model, adapters, practice_load.READING, host.device
    )
