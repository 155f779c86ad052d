"""Settings of a node: each acts on all of its processes, or is refused by its name."""

import functools
import itertools
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from openclaw_combine.method import CombineSettings
from openclaw_opd.hints import find_hints
from openclaw_rl.cli.options import parse_sets
from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.sglang.kind import KIND
from openclaw_rl.errors import SettingsError
from openclaw_rl.judge.client import HttpJudgeClient
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import ScoringTools
from openclaw_rl.settings import Branch, Settings, base, load
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
from openclaw_slime import launch, processes
from openclaw_slime.arguments import QWEN3_4B
from openclaw_slime.launch import Plan
from openclaw_slime.node_settings import INERT

JUDGED = JudgedTurn(
    Request("r", Scope("u", "s"), 1.0, (Message(role="user", content="q"),), None, None, (1,), SamplingParams(8)),
    Turn("t", "r", 2.0, (2,), (-0.1,), (True,), (VersionRun(0, 1),), "stop", Message(role="assistant", content="a")),
    NextState((Message(role="user", content="too long"),)),
    Verdict(-1, (-1,), "llm"),
    (),
)


@pytest.fixture(autouse=True)
def every_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ports of a plan are then those of its options, whatever else runs on this machine."""
    monkeypatch.setattr(launch, "is_free", lambda port: True)


@pytest.fixture(autouse=True, scope="module")
def packages_are_read_once() -> Iterator[None]:
    """Every look at the installed packages takes 10 ms, and a plan looks eight times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "entry_points", functools.cache(base.entry_points))
        yield


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
ACTING = {
    "": "log_level log_format",
    "server": "host served_model_name unknown_model api_keys admin_key trainer_token allowed_hosts max_body_mb "
    "body_timeout_s max_streams keepalive_s stall_s drain_s chat_commands",
    "limits": "requests_at_once tokens_a_day practice_share",
    "model": "chat_template reasoning_parser tool_call_parser context_length",
    "engine": "python args memory_fraction dtype max_running connect_timeout_s token_timeout_s start_timeout_s hold_s",
    "pictures": "enabled max_mb max_pixels max_pixels_per_request max_per_request memory_mb decode_timeout_s",
    "sampling": "temperature top_p top_k max_new_tokens truncated_sampling",
    "sessions": "turn_type_default pair_ttl_s max_open_turns",
    "judge": "kind url model api_key sees most_pictures picture_pixels votes quorum temperature max_new_tokens "
    "timeout_s workers retries max_waiting",
    "method": "demonstration_weight score_workers baseline baseline_decay baseline_limit hint_source hint_votes "
    "hint_max_tokens hint_place teacher guidance neutral_hint request_guidance neutral_request teacher_url "
    "student_term opd_clip top_k forward_kl anchor_weight score_timeout_s binary_weight opd_weight",
    "training": "enabled batch_size min_batch max_wait_s max_staleness max_tool_share lease_s max_waiting",
    "trainer": "learning_rate warmup_steps weight_decay beta1 beta2 max_grad_norm clip_low clip_high kl_coef "
    "old_log_probs tis_clip tis_mask max_tokens keep_checkpoints",
    "publisher": "max_step_kl max_base_kl base_url gate_s gate_replies gate_tokens gate_prompt_tokens "
    "self_test_tolerance canary_file max_canary_drop keep_versions call_timeout_s push_timeout_s unbroken_drain_s",
    "watch": "enabled turns min_turns drop p_value pause_after check_every_s",
    "practice": "enabled idle_s replies anchor_share max_tokens max_updates stop_share stop_passed max_kl "
    "patience machine_share score_timeout_s least_relevance variant_share",
    "episodes": "ttl_s group_ttl_s max_groups_ahead groups_per_step",
    "alerts": "webhook_url timeout_s retry_s",
    "tracking": "trackers project samples jsonl_mb wandb_mode",
    "redaction": "secrets pii pictures",
    "retention": "max_age_days max_gb every_s",
    "memory": "texts_mb words ledger_mb clean_texts",
}
"""Keys that a part of the node reads, by branch: server, engine, judge, driver or our losses."""
ACTS = {f"{branch}.{name}".lstrip(".") for branch, names in ACTING.items() for name in names.split()}
WITHOUT_DEFAULT = {
    "server.served_model_name": "policy",
    "server.admin_key": "secret",
    "server.trainer_token": "secret",
    "limits.requests_at_once": "4",
    "limits.tokens_a_day": "1000",
    "limits.practice_share": "0.5",
    "model.chat_template": "template.jinja",
    "engine.python": "python3",
    "model.context_length": "9000",
    "judge.url": "http://elsewhere/v1",
    "judge.model": "judge",
    "judge.api_key": "secret",
    "judge.sees": "true",
    "method.hint_max_tokens": "64",
    "method.teacher_url": "http://elsewhere",
    "publisher.base_url": "http://elsewhere",
    "publisher.canary_file": "canaries.jsonl",
    "alerts.webhook_url": "http://elsewhere/alerts",
    "retention.max_age_days": "30",
    "retention.max_gb": "2",
}
REFUSED = {
    "data_dir": "elsewhere",
    "server.port": "1",
    "engine.kind": "url",
    "engine.replicas": "3",
    "engine.urls": '["http://elsewhere"]',
    "trainer.kind": "local",
}
"""Values that differ from the node's own, for keys that only a variable sets."""


def leaves(branch: type[Branch], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield each key of the tree with its default; `method` is Combined's, which has the keys of all three."""
    for name, field in branch.model_fields.items():
        kind = CombineSettings if f"{prefix}{name}" == "method" else field.annotation
        if isinstance(kind, type) and issubclass(kind, Branch):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.default


LEAVES = dict(leaves(Settings))


@pytest.mark.parametrize("setting", ARGV)
def test_a_setting_acts_on_the_server_and_on_slime(setting):
    key, _, value = setting.partition("=")
    found = plan(sets=(setting,))
    branch, _, name = key.partition(".")
    assert getattr(getattr(settings_of(found), branch), name) == float(value)
    flag, word = ARGV[setting]
    assert words_of(found, flag) == word


@pytest.mark.parametrize("key", LEAVES)
def test_every_key_of_the_tree_acts_or_is_refused_by_its_name(key):
    """A new key fails here until it has its place in `ACTING` or in the launcher's tables."""
    default = LEAVES[key]
    if key not in ACTS:
        with pytest.raises(SettingsError, match=rf"^--set {re.escape(key)}: \S+ "):
            plan(method="combine", sets=(f"{key}={REFUSED.get(key, 3)}",))
        return
    text = json.dumps(default) if isinstance(default, str | bool | int | float | tuple) else None
    setting = f"{key}={WITHOUT_DEFAULT.get(key, text)}"
    found = plan(method="combine", sets=(setting,))
    named = [word for word in found.server.arguments if word.startswith(f"{key}=")]
    assert named == ([f'{key}=["--tp", "2"]'] if key == "engine.args" else [setting])


def test_no_list_names_a_key_that_is_gone():
    assert ACTS | set(WITHOUT_DEFAULT) | set(REFUSED) | set(INERT) <= set(LEAVES)
    assert not ACTS & set(INERT)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("data_dir=/elsewhere", "--set data_dir: it is set by SAVE_CKPT"),
        ("model.path=other", "--set model.path: it is set by HF_CKPT"),
        ("server.port=1", "--set server.port: it is set by PORT"),
        ("training.weights=lora", "--set training.weights: it is set by the node"),
        ("trainer.learning_rate=-1", r"trainer\.learning_rate: Input should be greater than 0 \(it is -1\)"),
        ("typo.key=1", "typo: no such setting"),
        ("engine.treads=4", r"engine\.treads: no such setting"),
        (
            "method.baseline=none",
            r"method\.baseline: it belongs to binary_rl, combine and agent, and method.name is opd",
        ),
        ("judge.votes=many", r"judge\.votes: .* \(it is 'many'\)"),
        ("server.host=0.0.0.0", "is not loopback: set server.api_keys first"),
        ("method.teacher=ema", 'method.teacher "ema" needs trainer.kind = "local"'),
        ("training.batch_size=3", "BATCH_SIZE 3 is no multiple"),
        ("nonsense", "write KEY=VALUE"),
    ],
)
def test_a_setting_that_cannot_act_is_refused(setting, says):
    with pytest.raises(SettingsError, match=says):
        plan("--actor-tp", "2", sets=(setting,))


def test_the_judges_own_checkpoint_is_the_fixed_teacher():
    found = settings_of(plan())
    assert (found.method.teacher, found.method.teacher_url) == ("base", f"http://127.0.0.1:{launch.PRM_PORT}")
    assert (found.trainer.kl_coef, plan().notes) == (0.0, ())
    named = settings_of(plan("--prm-checkpoint", "./POLICY", "--prm-port", "31000"))
    assert named.method.teacher_url == "http://127.0.0.1:31000"


@pytest.mark.parametrize("method", ["opd", "binary_rl"])
def test_the_judges_own_checkpoint_is_the_base_of_the_gate_for_every_method(method):
    assert settings_of(plan(method=method)).publisher.base_url == "http://127.0.0.1:30001"
    assert settings_of(plan("--prm-checkpoint", "OTHER", method=method)).publisher.base_url is None


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


def test_a_teacher_that_a_setting_moves_is_held_near_its_base_too():
    found = plan(sets=("method.teacher=policy",))
    settings = settings_of(found)
    assert (settings.method.teacher, settings.method.teacher_url, settings.trainer.kl_coef) == ("policy", None, 0.01)
    assert words_of(found, "--kl-loss-coef") == "0.01"
    assert 'method.teacher is "policy". Replies may drift; KL_COEF is 0.01' in found.text()
    chosen = plan(sets=("method.teacher=policy", "trainer.kl_coef=0"))
    assert settings_of(chosen).trainer.kl_coef == 0
    without = plan(method="combine", sets=("method.teacher=policy", "method.opd_weight=0"))
    assert (settings_of(without).trainer.kl_coef, without.notes) == (0, ()), "it distils nothing"
    elsewhere = ("method.teacher=base", "method.teacher_url=http://elsewhere")
    held = plan("--prm-gpus", "0", "--prm-url", "http://j/v1", sets=elsewhere)
    assert (settings_of(held).method.teacher_url, held.notes) == ("http://elsewhere", ())


def test_a_top_k_of_any_source_needs_whole_samples(monkeypatch):
    cp = ("--actor-cp", "2")
    says = r"TOP_K \(method\.top_k\) needs CP=1"
    with pytest.raises(SettingsError, match=says):
        plan(*cp, "--top-k", "50")
    with pytest.raises(SettingsError, match=says):
        plan(*cp, sets=("method.top_k=50",))
    assert plan(*cp, "--top-k", "50", sets=("method.top_k=0",)).prm is not None
    monkeypatch.setenv("OPENCLAW_RL__METHOD__TOP_K", "50")
    with pytest.raises(SettingsError, match=says):
        plan(*cp)


def test_a_prm_that_no_part_asks_is_not_started():
    other = ("--prm-checkpoint", "OTHER")  # no base for the gate
    for found in (
        plan(*other, "--judge", "rules", method="binary_rl"),
        plan(*other, method="binary_rl", sets=("judge.kind=rules",)),
        plan(*other, "--prm-url", "http://j/v1", method="binary_rl"),
        plan(*other, method="binary_rl", sets=("judge.url=http://j/v1",)),
        plan("--judge", "rules", method="binary_rl", sets=("publisher.base_url=http://base",)),
    ):
        assert (found.prm, found.layout.prm_gpus) == (None, 0)
        assert found.notes == ("no part asks the PRM, so it is not started: PRM_GPUS 2 have no work",)
    gate = plan("--judge", "rules", method="binary_rl")
    assert gate.prm is not None, "its base is the gate's"
    for words in ((), ("--judge", "rules")):  # its base is the teacher
        assert plan(*words, sets=("publisher.base_url=http://base",)).prm is not None
    hints = plan(*other, sets=("judge.kind=rules",))
    assert hints.prm is not None, "it writes the hints"
    with pytest.raises(SettingsError, match="PRM_GPUS is 0 and PRM_URL is not set"):
        plan("--prm-gpus", "0")
    assert plan("--prm-gpus", "0", method="binary_rl", sets=("judge.url=http://j/v1",)).prm is None


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


def test_a_prm_has_a_port_that_sglang_takes():
    with pytest.raises(SettingsError, match="PRM_PORT 55536: SGLang takes ports up to 55535"):
        plan("--prm-port", "55536")


def test_a_prm_leaves_its_usual_port_to_the_process_that_has_it(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(launch, "PRM_PORT", taken)
        monkeypatch.setattr(launch, "is_free", processes.is_free)
        found = plan()
        assert found.prm is not None
        assert found.prm.port not in (taken, None)
        assert settings_of(found).judge.url == f"http://127.0.0.1:{found.prm.port}/v1"
        assert settings_of(found).method.teacher_url == f"http://127.0.0.1:{found.prm.port}"
        assert plan("--dry-run").prm.port == taken, "what is printed is the same everywhere"


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


def test_the_judge_scores_long_replies_in_slices_as_the_policys_engine_does(tmp_path):
    """Otherwise the logits of a whole prefill chunk are made at once, beside the chats' memory."""
    probed = {"version": "0.5.15", "options": ["stream_output"], "has_flash_attention": True, "has_flashinfer": True}
    python, model = tmp_path / "python", tmp_path / "model"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(probed)}'\n")
    python.chmod(0o755)
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_4B))
    (model / "model.safetensors").touch()
    found = plan("--engine-python", str(python))
    settings = settings_of(plan("--engine-python", str(python), "--hf-checkpoint", str(model)))

    async def on_exit() -> None: ...

    engine = KIND.child(settings, DataDir.of(tmp_path), 1, on_exit).command
    for environ in (found.prm.environ, engine.environ):
        assert environ["SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK"] == "1"
        assert environ["SGLANG_LOGITS_PROCESSER_CHUNK_SIZE"] == "1024"
