"""OPD and Combined on real parts: a model scores itself, corrections are the hints, one LoRA step runs.

OPD runs with an EMA teacher too, which serves scoring beside its version. The model is the bundled one's first layers,
since no assertion depends on the sense of a reply. `test_loop.py` runs the same loop on all layers. A method of another
package runs the same way.
"""

import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from plug_in import LENGTH, install

from openclaw_rl.testing.running_server import RunningServer

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

CORRECTION = "No lists please, one short sentence only."


def chat(server: RunningServer, number: int, following: str, *, is_long: bool = False) -> str:
    """Chat one turn and the user's answer to it; return the turn's id. is_long: no token ends the reply."""
    headers = {"X-Session-Id": f"s{number}"}
    messages = [{"role": "user", "content": f"Give me three tips to sleep better, please, number {number}."}]
    body: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": 16, "ignore_eos": is_long}
    url = f"{server.url}/v1/chat/completions"
    reply = httpx.post(url, json=body, headers=headers, timeout=300).json()
    message = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
    body |= {"messages": [*messages, message, {"role": "user", "content": following}], "max_tokens": 1}
    httpx.post(url, json=body, headers=headers, timeout=300).raise_for_status()
    return str(reply["id"])


def gap(record: Any) -> list[float]:
    sample = record["sample"]
    return [t - s for t, s in zip(sample["teacher_log_probs"], sample["student_log_probs"], strict=True)]


@pytest.mark.parametrize(("method", "teacher"), [("opd", "ema"), ("combine", "base")])
def test_a_correction_becomes_a_new_version(method: str, teacher: str, tmp_path: Path, short_model: Path) -> None:
    settings = ["--method", method, "--set", f"method.teacher={teacher}", "--batch-size", "2"]
    settings += ["--set", f"model.path={short_model}", "--set", "trainer.nice=0", "--set", "practice.enabled=false"]
    with RunningServer(tmp_path / "data", settings) as learner:
        answers = [CORRECTION, "Thanks, that is perfect!" if method == "combine" else f"{CORRECTION} Shorter."]
        ids = [chat(learner, number, answer, is_long=True) for number, answer in enumerate(answers)]
        status = learner.wait_for("version 1 serves", lambda now: now["serving"] == 1, 300)
        corrected, other = (learner.admin("GET", f"/v1/turns/{turn_id}") for turn_id in ids)
        assert [corrected["trained_in"], other["trained_in"]] == [1, 1]
        assert corrected["sample"]["scored_version"] == 0
        gaps = gap(corrected)
        assert len(gaps) == len(corrected["turn"]["response_ids"])
        assert all(map(math.isfinite, gaps))
        # Without the hint both passes score one prompt, and float32 rounds by 1e-5. Three layers feel a hint little.
        assert max(map(abs, gaps)) > 1e-3, "the hint changes what the model says"
        # The student's side is at temperature 1, the rollout's at 0.7: the same tokens, other distributions.
        assert corrected["sample"]["student_log_probs"] != corrected["turn"]["rollout_log_probs"]
        if method == "combine":
            assert [corrected["sample"]["reward"], other["sample"]["reward"]] == [-1.0, 1.0]
            assert other["sample"]["teacher_log_probs"] is None
            assert status["scoring"]["counts"] == {"hindsight_scored": 1, "hindsight_no_hint": 1}
        else:
            assert [corrected["sample"]["reward"], other["sample"]["reward"]] == [None, None]
            assert status["scoring"]["counts"] == {"hindsight_scored": 2}
            assert len(list((tmp_path / "data" / "versions").glob("*/ema/adapter_model.safetensors"))) == 1
            later = learner.wait_for_turn(chat(learner, 9, CORRECTION, is_long=True), "sampled", 120)
            assert later["sample"]["scored_version"] == 1
            assert max(map(abs, gap(later))) > 0.05
        assert status["problems"] == []


def test_a_method_of_another_package_is_trained_with(
    tmp_path: Path, short_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "length", LENGTH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    settings = ["--method", "length", "--set", "method.target_tokens=4", "--batch-size", "2"]
    settings += ["--set", f"model.path={short_model}", "--set", "trainer.nice=0"]
    with RunningServer(tmp_path / "data", settings) as learner:
        ids = [chat(learner, number, CORRECTION) for number in range(2)]
        learner.wait_for("version 1 serves", lambda now: now["serving"] == 1, 300)
        for turn_id in ids:
            record = learner.admin("GET", f"/v1/turns/{turn_id}")
            assert record["trained_in"] == 1
            tokens = len(record["turn"]["response_ids"])
            assert record["sample"]["reward"] == pytest.approx(1 - abs(tokens - 4) / 4)
