"""Stage `practice` of the node check: guided practice on the node, full weights, the base in the judge's own engine.

The launch script of Combined runs with rules in the judge's place, so the PRM serves as the base alone: it is the
teacher, and it measures the wish. A user corrects a few replies and goes away (`practice_load`). The log-probs of the
teacher are compared with plain passes of the checkpoint, the student's with Megatron's exports (`guided_teacher`).
"""

import time
from pathlib import Path
from typing import Any

import httpx

from gpu import guided_teacher, models, practice_load
from gpu.host import NodeHost
from gpu.node_processes import driver_figures
from gpu.node_script import END_S, SETTINGS, come_up, start, stop
from gpu.server_files import audit
from gpu.stages import Figures
from openclaw_rl.testing.running_server import RunningServer

UPDATES, OF_EACH, TOP_K = 2, 8, 20
TOKENS, TINY_TOKENS = 64, 12
MET_S, COMPARE_S = 30.0, 40.0
"""Time for chats that meet practice, and for the passes afterwards."""
VARIABLES = {"JUDGE": "rules", "PRM_URL": "", "CHECKPOINT_EVERY": "1", "TOP_K": str(TOP_K)}
"""Each version is exported, so that passes can be made under its weights."""
MORE = (
    "trainer.learning_rate=1e-4",  # a few steps must move random weights further than bfloat16's noise
    "practice.least_relevance=0",
    "publisher.keep_versions=6",  # a checkpoint of Megatron has eight gigabytes
)


def run(host: NodeHost) -> Figures:
    checkpoint = models.qwen3(host.work / "tokenizer", host.checkpoint, device=host.device)
    settings = [word for word in (*SETTINGS, *practice_load.SETTINGS) if "keep_versions" not in word]
    settings += [*MORE, *(["practice.max_tokens=12", "practice.replies=6"] if host.is_tiny else [])]
    figures: Figures = {"model": checkpoint.name, "start-up s": {}}
    end = host.ends_at - END_S[host.gpus]
    findings: list[str] = []
    records: list[Any] = []
    weights: dict[int, Path] = {}
    script = start(host, checkpoint, "", name="practice", variables=VARIABLES, settings=settings)
    try:
        come_up(script, figures["start-up s"], end)
        server = RunningServer(script.data_dir)
        server.url = script.url
        practice_load.correct(server, max_tokens=TINY_TOKENS if host.is_tiny else TOKENS)
        left_s = end - time.monotonic() - MET_S - COMPARE_S
        progress = practice_load.practised(server, updates=UPDATES, timeout_s=left_s)
        figures |= progress.figures()
        findings += progress.findings(UPDATES, must_learn=False)
        figures["chats that meet practice"] = met = practice_load.latency(server, MET_S)
        records = server.turns(practice_load.NEWEST)
        figures["marks"] = marked = practice_load.marks(server, records, host.out)
        findings += [*met["findings"], *marked["findings"]]
        status = server.status()
        figures["problems"] = status["problems"]
        findings += [f"problem: {one}" for one in status["problems"]]
        folders = {
            row["weight_version"]: script.data_dir / row["folder"] for row in status["versions"] if row["folder"]
        }
        weights = {version: folder for version, folder in folders.items() if folder.is_dir()}
    except (RuntimeError, TimeoutError, OSError, httpx.HTTPError) as error:
        findings.append(f"failed: {error!r}"[:500])
    figures |= stop(script, script.below() if script.process.poll() is None else [], END_S[host.gpus] - 20)
    if script.driver_log.is_file():
        figures |= driver_figures(script.driver_log, 0)
    figures["teacher"] = compared = _compared(host, checkpoint, records, weights)
    findings += [*compared["findings"], *(f"audit: {one}" for one in audit(script.data_dir))]
    return figures | {"findings": findings}


def _compared(host: NodeHost, checkpoint: Path, records: list[Any], weights: dict[int, Path]) -> Figures:
    scored = {row["sample"]["scored_version"] for row in records if row["practice"] == "wish" and row["sample"]}
    newest = max(scored & weights.keys(), default=0)
    rows = practice_load.chosen(records, sorted({min(scored, default=0), newest}), of_each=OF_EACH)
    samples = [guided_teacher.taught(row, checkpoint, practice_load.READING) for row in rows]
    return guided_teacher.compare(
        [one for one in samples if one is not None], checkpoint, weights, practice_load.READING, host.device
    )
