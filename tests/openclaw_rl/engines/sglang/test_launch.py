"""How SGLang is started. That it starts is checked on a GPU host (scripts/gpu); here: what it would be told."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.sglang import launch
from openclaw_rl.engines.sglang.kind import KIND, VISIBLE
from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import (
    EngineSettings,
    ModelSettings,
    PoliciesSettings,
    PublisherSettings,
    Settings,
    TrainerSettings,
    load,
)

OPTIONS = frozenset(
    {
        "incremental_streaming_output",
        "enable_priority_scheduling",
        "disable_priority_preemption",
        "disable_prefill_cuda_graph",
        "prefill_max_requests",
        "disable_overlap_schedule",
    }
)
WHOLE = launch.Installed("0.5.15.post1", OPTIONS, has_flash_attention=True, has_flashinfer=True)
ENGINE = EngineSettings(kind="sglang")
ADAPTERS = launch.Adapters.of(
    TrainerSettings(rank=8, target_modules=("q_proj", "v_proj")), PublisherSettings(), PoliciesSettings()
)


def line(
    installed: launch.Installed = WHOLE,
    engine: EngineSettings = ENGINE,
    adapters: launch.Adapters | None = ADAPTERS,
    context_length: int | None = None,
) -> str:
    words = launch.argv(
        installed, engine, folder=Path("/model"), name="tiny", port=7, context_length=context_length, adapters=adapters
    )
    return " ".join(words)


def test_the_command_line_of_a_lora_run() -> None:
    assert line(context_length=4096) == (
        "--model-path /model --served-model-name tiny --host 127.0.0.1 --port 7 --dtype bfloat16"
        " --mem-fraction-static 0.5 --incremental-streaming-output --log-level-http warning --context-length 4096"
        " --enable-lora --max-lora-rank 8 --lora-target-modules q_proj v_proj --max-loras-per-batch 5"
        " --enable-priority-scheduling --disable-priority-preemption --disable-prefill-cuda-graph"
    )


@pytest.mark.parametrize(
    ("asked", "model", "served"),
    [
        ("auto", "bundled", "float16"),
        ("auto", "Qwen/Qwen3-4B", "bfloat16"),
        ("bfloat16", "bundled", "bfloat16"),
        ("float16", "Qwen/Qwen3-4B", "float16"),
    ],
)
def test_the_bundled_model_is_served_in_float16(asked: str, model: str, served: str) -> None:
    settings = load(None, {"engine.dtype": asked, "model.path": model}, {})
    assert launch.dtype_of(settings.engine, settings.model) == served


def test_full_weights_need_no_room_for_adapters() -> None:
    assert "lora" not in line(adapters=None)


def test_kernels_that_are_not_installed_are_not_asked_for() -> None:
    bare = launch.Installed("0.5.15", OPTIONS, has_flash_attention=False, has_flashinfer=False)
    assert "--attention-backend triton --sampling-backend pytorch" in line(bare)
    assert "--mm-attention-backend" not in line(bare)
    sees = launch.Installed("0.5.15", OPTIONS | {"mm_attention_backend"}, False, True)
    assert "--attention-backend triton --mm-attention-backend triton_attn" in line(sees)


def test_flags_of_the_user_replace_ours() -> None:
    engine = EngineSettings(kind="sglang", max_running=64, args=("--dtype=float16", "--tp", "2", "--port", "9"))
    words = line(engine=engine)
    assert words.endswith("--dtype=float16 --tp 2 --port 9")
    assert "bfloat16" not in words
    assert words.count("--port") == 1
    assert "--max-running-requests 64" in words


@pytest.mark.parametrize("unknown", ["prefill_max_requests", "disable_overlap_schedule"])
def test_an_engine_that_scores_given_ids_takes_one_prompt_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    """Its scheduler ends of a batch where one prompt names ids and another does not."""
    monkeypatch.setattr(launch, "look", lambda python: WHOLE)
    guided = {"method.name": "combine", "method.top_k": 4, "method.guidance": 1.0, "engine.kind": "sglang"}
    for values, ends_with in ((guided, True), (guided | {"method.top_k": 0}, False)):
        settings = load(None, {**values, "engine.args": ["--prefill-max-requests", "9", "--tp", "1"]}, {})
        child = KIND.child(settings, DataDir(tmp_path), 7, lambda *_: None)
        assert (child.command.arguments[-3:] == launch.TAKES_IDS) is ends_with
    monkeypatch.setattr(launch, "look", lambda python: dataclasses.replace(WHOLE, options=OPTIONS - {unknown}))
    flag = "--" + unknown.replace("_", "-")
    with pytest.raises(SettingsError, match=rf"does not know {flag}, which method\.top_k needs"):
        KIND.child(load(None, guided, {}), DataDir(tmp_path), 7, lambda *_: None)


def test_an_sglang_that_repeats_whole_streams_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"SGLang 0\.3 cannot stream only what is new"):
        line(launch.Installed("0.3", frozenset(), has_flash_attention=True, has_flashinfer=True))


def test_an_environment_tells_what_it_holds(tmp_path: Path) -> None:
    python = environment(tmp_path)
    with pytest.raises(SettingsError, match="SGLang is not installed there"):
        launch.look(str(python))
    site = next((tmp_path / "lib").glob("python3*")) / "site-packages"
    for folder in ("sglang/srt", "sgl_kernel", "sglang-0.5.15.post1.dist-info"):
        (site / folder).mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text("raise SystemExit('nobody imports it')")
    (site / "sglang" / "srt" / "server_args.py").write_text("class ServerArgs:\n    enable_lora: bool = False\n")
    (site / "sglang-0.5.15.post1.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.15.post1\n")
    (site / "sgl_kernel" / "__init__.py").touch()
    (site / "sgl_kernel" / "flash_ops.abi3.so").touch()
    assert launch.look(str(python)) == launch.Installed(
        "0.5.15.post1", frozenset({"enable_lora"}), has_flash_attention=True, has_flashinfer=False
    )


def test_an_interpreter_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be run"):
        launch.look(str(tmp_path / "python"))


def environment(root: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    return root / "bin" / "python"


def replica_settings(replicas: int, args: Sequence[str]) -> Settings:
    return load(None, {"engine.kind": "sglang", "engine.replicas": replicas, "engine.args": list(args)}, {})


@pytest.mark.parametrize(
    ("visible", "args", "gpus"),
    [
        (None, (), ["0", "1", "2"]),
        (None, ("--tp", "2"), ["0,1", "2,3", "4,5"]),
        ("7,3,1,0", (), ["7", "3", "1"]),
        ("GPU-a, GPU-b,GPU-c", (), ["GPU-a", "GPU-b", "GPU-c"]),
        ("MIG-1a,MIG-2b,MIG-3c", (), ["MIG-1a", "MIG-2b", "MIG-3c"]),
    ],
)
def test_each_of_several_engines_sees_gpus_of_its_own(
    visible: str | None, args: tuple[str, ...], gpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    monkeypatch.setattr(launch, "look", lambda _: WHOLE)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    settings = replica_settings(3, args).model_copy(update={"model": ModelSettings(path=str(tmp_path))})
    assert list(KIND.problems(settings)) == []
    assert [need.gpus for need in KIND.gpus(settings)] == [3 * len(gpus[0].split(","))]

    async def on_exit() -> None: ...

    data = DataDir.prepare(tmp_path / "data")
    children = [KIND.replica(settings, data, 7000 + number, on_exit, number) for number in (1, 2, 3)]
    assert [child.name for child in children] == ["engine 1", "engine 2", "engine 3"]
    assert [child.command.environ[VISIBLE] for child in children] == gpus
    assert [set(launch.ENVIRON) <= child.command.environ.keys() for child in children] == [True] * 3
    alone = KIND.child(settings, data, 7000, on_exit)
    assert alone.name == "engine"
    assert VISIBLE not in alone.command.environ


@pytest.mark.parametrize(
    ("visible", "args", "says"),
    [
        ("0,1", ("--tp", "2"), "engine.replicas 2: wants 4 GPUs, and CUDA_VISIBLE_DEVICES names 2"),
        ("", (), "engine.replicas 2: wants 2 GPUs, and CUDA_VISIBLE_DEVICES names 0"),
        ("0,1", ("--base-gpu-id=1",), "engine.args --base-gpu-id: with engine.replicas the server gives each engine"),
        ("0,1", ("--port", "9"), "engine.args --port: with engine.replicas the server gives each engine its own port"),
    ],
)
def test_several_engines_that_do_not_fit_are_refused(
    visible: str, args: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    (problem,) = KIND.problems(replica_settings(2, args))
    assert problem.startswith(says)
    assert list(KIND.problems(replica_settings(1, args))) == []


def test_doctor_has_a_line_for_each_of_several_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "look", lambda _: WHOLE)
    monkeypatch.setenv(VISIBLE, "4,5,6")
    lines = [found.line() for found in KIND.findings(replica_settings(2, ("--tp", "2"))) if "engine" in found.what]
    assert lines == [
        f"  engine 1           GPU 4, 5; a free port at each start; SGLang {WHOLE.version} of {sys.executable}",
        "! engine 2           GPU 6 of CUDA_VISIBLE_DEVICES, and it wants 2",
    ]
    monkeypatch.setenv(VISIBLE, "")
    none = [found.line() for found in KIND.findings(replica_settings(2, ())) if "engine" in found.what]
    assert none == [f"! engine {n}           no GPU of CUDA_VISIBLE_DEVICES, and it wants 1" for n in (1, 2)]
    assert [found.what for found in KIND.findings(replica_settings(1, ()))] == ["sglang"]


MISTRAL = {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}
QWEN = {"model_type": "qwen2", "sliding_window": 4096, "max_position_embeddings": 32768}
GEMMA3 = {"model_type": "gemma3", "text_config": {**MISTRAL, "model_type": "gemma3_text"}}


@pytest.mark.parametrize(
    ("config", "context", "refused"),
    [
        (MISTRAL, None, True),
        (MISTRAL, 8192, True),
        (MISTRAL, 4096, False),  # no token sees beyond it
        ({**MISTRAL, "sliding_window": None}, None, False),
        ({**MISTRAL, "model_type": "phi3", "sliding_window": 2047, "max_position_embeddings": 4096}, None, True),
        ({**QWEN, "use_sliding_window": False}, None, False),
        (QWEN, None, False),  # transformers' default for Qwen is no window
        ({**QWEN, "use_sliding_window": True}, None, True),
        ({**QWEN, "use_sliding_window": True, "layer_types": ["full_attention"]}, None, False),
        (GEMMA3, None, False),
    ],
)
def test_a_window_that_sglang_does_not_apply_is_refused(
    config: dict[str, object], context: int | None, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    changes = {"engine.kind": "sglang", "model.path": str(tmp_path)} | (
        {"model.context_length": context} if context else {}
    )
    problems = list(KIND.problems(load(None, changes, {})))
    assert len(problems) == refused
    if refused:
        assert f"a window of {config['sliding_window']} tokens, and SGLang serves it without one" in problems[0]
    assert (
        list(KIND.problems(load(None, changes | {"training.enabled": False}, {}))) == []
    )  # it serves, as SGLang would
