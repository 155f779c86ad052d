"""Settings of a node: each acts on all of its processes, or is refused by its name."""

import itertools
import json
from pathlib import Path

import httpx
import pytest

from openclaw_opd.hints import find_hints
from openclaw_rl.cli.options import parse_sets
from openclaw_rl.errors import SettingsError
from openclaw_rl.judge.client import HttpJudgeClient
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import ScoringTools
from openclaw_rl.settings import Settings, TrainerSettings, load
from openclaw_rl.types import (
    JudgedTurn,
    NextState,
    Request,
    SamplingParams,
    Scope,
    Turn,
    Verdict,
    VersionRun,
)
from openclaw_slime import launch
from openclaw_slime.launch import Plan

JUDGED = JudgedTurn(
    Request("r", Scope("u", "s"), 1.0, (Message(role="user", content="q"),), None, None, (1,), SamplingParams(8)),
    Turn("t", "r", 2.0, (2,), (-0.1,), (True,), (VersionRun(0, 1),), "stop", Message(role="assistant", content="a")),
    NextState((Message(role="user", content="too long"),)),
    Verdict(-1, (-1,), "llm"),
    (),
)


@pytest.fixture(autouse=True)
def every_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_free", lambda port: True)


def plan(*words: str, method: str = "opd", sets: tuple[str, ...] = ()) -> Plan:
    given = ["--method", method, "--hf-checkpoint", "POLICY", *words]
    for setting in sets:
        given += ["--set", setting]
    return launch._plan_of(launch.launch_parser().parse_args(given))


def settings_of(found: Plan) -> Settings:
    words = found.server.arguments
    return load(None, parse_sets([value for flag, value in itertools.pairwise(words) if flag == "--set"]), {})


def words_of(found: Plan, flag: str) -> str:
    words = found.driver.arguments
    return words[words.index(flag) + 1]


ARGV = {
    "trainer.learning_rate=3e-6": ("--lr", "3e-06"),
    "trainer.weight_decay=0.02": ("--weight-decay", "0.02"),
    "trainer.beta1=0.8": ("--adam-beta1", "0.8"),
    "trainer.beta2=0.95": ("--adam-beta2", "0.95"),
    "trainer.max_grad_norm=0.5": ("--clip-grad", "0.5"),
    "trainer.warmup_steps=7": ("--lr-warmup-iters", "7"),
    "trainer.kl_coef=0.2": ("--kl-loss-coef", "0.2"),
    "trainer.keep_checkpoints=5": ("--keep-checkpoints", "5"),
    "sampling.temperature=0.9": ("--rollout-temperature", "0.9"),
    "training.batch_size=32": ("--global-batch-size", "32"),
    "model.context_length=9000": ("--rollout-max-context-len", "9000"),
}
OURS = {"clip_low", "clip_high", "old_log_probs", "tis_clip", "tis_mask", "max_tokens"}
"""Our losses and our driver read these from the server's settings."""


@pytest.mark.parametrize("setting", ARGV)
def test_a_setting_acts_on_the_server_and_on_slime(setting):
    key, _, value = setting.partition("=")
    found = plan(sets=(setting,))
    branch, _, name = key.partition(".")
    assert getattr(getattr(settings_of(found), branch), name) == float(value)
    flag, word = ARGV[setting]
    assert words_of(found, flag) == word


@pytest.mark.parametrize("key", sorted(TrainerSettings.model_fields))
def test_every_key_of_the_trainer_acts_or_is_refused_by_its_name(key):
    if any(setting.startswith(f"trainer.{key}=") for setting in ARGV):
        return
    value = {"max_tokens": "512", "old_log_probs": "rollout", "clip_low": "0.1"}.get(key, "3")
    if key in OURS:
        assert f"trainer.{key}={value}" in plan(sets=(f"trainer.{key}={value}",)).server.arguments
        return
    with pytest.raises(SettingsError, match=rf"--set trainer\.{key}: it is "):
        plan(sets=(f"trainer.{key}={value}",))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("data_dir=/elsewhere", "--set data_dir: it is set by SAVE_CKPT"),
        ("model.path=other", "--set model.path: it is set by HF_CKPT"),
        ("server.port=1", "--set server.port: it is set by PORT"),
        ("training.weights=lora", "--set training.weights: it is set by the node"),
        ("trainer.learning_rate=-1", "--set trainer.learning_rate: "),
        ("training.batch_size=3", "BATCH_SIZE 3 is no multiple"),
        ("nonsense", "write KEY=VALUE"),
    ],
)
def test_a_setting_that_cannot_act_is_refused(setting, says):
    with pytest.raises(SettingsError, match=says):
        plan("--actor-tp", "2", sets=(setting,))


def test_the_judges_own_checkpoint_is_the_fixed_teacher():
    found = settings_of(plan())
    assert (found.method.teacher, found.method.teacher_url) == ("base", "http://127.0.0.1:30001")
    assert (found.trainer.kl_coef, plan().notes) == (0.0, ())
    named = settings_of(plan("--prm-checkpoint", "./POLICY", "--prm-port", "31000"))
    assert named.method.teacher_url == "http://127.0.0.1:31000"


@pytest.mark.parametrize("method", ["opd", "combine"])
def test_guidance_goes_with_the_judges_base_and_with_no_other_teacher(method):
    found = settings_of(plan(method=method, sets=("method.guidance=0.5",)))
    assert (found.method.guidance, found.method.teacher) == (0.5, "base")
    assert settings_of(plan(method=method)).method.guidance == 0, "no model of a node was measured"
    with pytest.raises(SettingsError, match=r"method\.guidance is for"):
        settings_of(plan("--prm-checkpoint", "OTHER", method=method, sets=("method.guidance=0.5",)))


@pytest.mark.parametrize("words", [("--prm-checkpoint", "OTHER"), ("--prm-gpus", "0", "--prm-url", "http://j/v1")])
def test_without_a_fixed_teacher_the_policy_is_held_near_its_base(words):
    found = plan(*words)
    settings = settings_of(found)
    assert (settings.method.teacher, settings.method.teacher_url, settings.trainer.kl_coef) == ("policy", None, 0.01)
    assert words_of(found, "--kl-loss-coef") == "0.01"
    assert "KL_COEF is 0.01" in found.text()
    assert settings_of(plan(*words, "--kl-coef", "0")).trainer.kl_coef == 0
    assert settings_of(plan(*words, method="binary_rl")).trainer.kl_coef == 0  # it distils nothing


async def test_a_hint_behind_a_long_thought_arrives_whole():
    """3,000 tokens of thought, under the settings that the launcher gives the server."""
    settings = settings_of(plan("--prm-votes", "1"))
    asked: list[int] = []

    def judge(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "judge"}]})
        asked.append(json.loads(request.content)["max_tokens"])
        is_cut = asked[-1] < 3100
        text = "thought " * 3000 + ("" if is_cut else "</think>\\boxed{1}\n[HINT_START]Answer briefly.[HINT_END]")
        choice = {"message": {"content": text}, "finish_reason": "length" if is_cut else "stop"}
        return httpx.Response(200, json={"choices": [choice]})

    async with httpx.AsyncClient(transport=httpx.MockTransport(judge)) as client:
        ask = HttpJudgeClient(client, settings.judge)
        tools = ScoringTools(settings=settings.method, ask=ask, judge_tokens=settings.judge.max_new_tokens)
        found = await find_hints(JUDGED, tools)
    assert found.hints == ("Answer briefly.",)
    assert set(asked) == {settings.judge.max_new_tokens}  # no second try was needed


def test_votes_and_tokens_of_the_judge_are_those_of_its_hints():
    found = settings_of(plan("--prm-votes", "5", "--prm-max-new-tokens", "6000"))
    assert (found.method.hint_votes, found.judge.votes) == (5, 5)
    assert (found.method.hint_max_tokens, found.judge.max_new_tokens) == (None, 6000)
    own = settings_of(plan(sets=("method.hint_max_tokens=2000",)))
    assert own.method.hint_max_tokens == 2000


def test_a_prm_has_a_port_that_sglang_takes(monkeypatch):
    with pytest.raises(SettingsError, match="PRM_PORT 55536: SGLang takes ports up to 55535"):
        plan("--prm-port", "55536")
    monkeypatch.setattr(launch, "is_free", lambda port: port != launch.PRM_PORT)
    found = plan()
    assert found.prm is not None
    assert found.prm.port not in (launch.PRM_PORT, None)
    assert settings_of(found).judge.url == f"http://127.0.0.1:{found.prm.port}/v1"
    assert settings_of(found).method.teacher_url == f"http://127.0.0.1:{found.prm.port}"
    assert plan("--dry-run").prm.port == launch.PRM_PORT


def test_openclaws_block_for_the_node_is_what_the_script_serves():
    text = (Path(__file__).parents[2] / "instructions/node.md").read_text()
    block = json.loads(text.partition("```json\n")[2].partition("```")[0])
    (model,) = block["models"]["providers"]["rl"]["models"]
    settings = settings_of(plan())
    assert model["contextWindow"] == settings.model.context_length
    assert model["maxTokens"] == settings.sampling.max_new_tokens
    assert model["reasoning"] is (settings.model.reasoning_parser == "qwen3")
    assert settings.sampling.temperature == 0.6
    assert "deny" not in block.get("tools", {})


def test_more_arguments_of_the_engine_come_behind_its_tensor_parallel_size():
    """They replaced it: an engine of two GPUs then ran on one."""

    def engine_args(*sets: str) -> list[str]:
        return list(settings_of(plan(sets=sets)).engine.args)

    assert engine_args() == ["--tp", "2"]
    assert engine_args('engine.args=["--log-level", "debug"]') == ["--tp", "2", "--log-level", "debug"]
    assert engine_args('engine.args=["--tp-size=2"]') == ["--tp-size=2"]
    with pytest.raises(SettingsError, match=r"engine\.args --quantization: the weights"):
        plan(sets=('engine.args=["--quantization", "fp8"]',))


def test_the_judge_scores_long_replies_in_slices_as_the_policys_engine_does():
    assert plan().prm.environ["SGLANG_LOGITS_PROCESSER_CHUNK_SIZE"] == "1024"
