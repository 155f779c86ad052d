"""Engine kinds are found by name, and a package of one file adds one."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from typer.testing import CliRunner

from openclaw_rl.cli.main import app
from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.kind import EngineKind, GpuNeed, load_kind
from openclaw_rl.errors import SettingsError
from openclaw_rl.server import preflight
from openclaw_rl.server.child_commands import engine_child
from openclaw_rl.settings import Settings, load
from openclaw_rl.testing.running_server import RunningServer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

PLUG_IN = '''\
"""An engine kind of another package: the stub engine as the server's child."""

from openclaw_rl.engines.kind import EngineKind, Finding
from openclaw_rl.processes.command import ChildCommand
from openclaw_rl.processes.supervisor import Child


class Parrot(EngineKind):
    def child(self, settings, data, port, on_exit):
        words = ["--port", str(port), "--mean-tokens", "8", "--tokens-per-s", "0"]
        log_file = data.logs / "engine.log"
        return Child("engine", ChildCommand("openclaw_rl.testing", tuple(words)), log_file=log_file, on_exit=on_exit)

    def problems(self, settings):
        if settings.engine.threads == 13:
            yield "engine.threads 13: no parrot has so many"

    def findings(self, settings):
        yield Finding("parrot", "ok", "repeats after you")


KIND, BROKEN = Parrot(), "no engine kind"
'''


@pytest.fixture
def parrot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the package `parrot-engine`, on the path of this process and of its children."""
    folder = tmp_path / "site"
    info = folder / "parrot_engine-0.dist-info"
    info.mkdir(parents=True)
    (folder / "parrot_engine.py").write_text(PLUG_IN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parrot-engine\nVersion: 0\n")
    points = {"parrot": "parrot_engine:KIND", "gone": "parrot_engine:GONE", "other": "parrot_engine:BROKEN"}
    lines = [f"{name} = {value}\n" for name, value in points.items()]
    (info / "entry_points.txt").write_text("[openclaw_rl.engines]\n" + "".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "parrot_engine", raising=False)
    return folder


def test_the_kinds_of_this_package() -> None:
    assert not load_kind("embedded").loses_adapter_count
    assert load_kind("sglang").loses_adapter_count
    assert load_kind("url").loses_adapter_count


def test_the_servers_process_loads_every_kind_without_torch() -> None:
    code = "import sys\nfrom openclaw_rl.engines.kind import load_kind\n"
    code += "for name in ('embedded', 'sglang', 'url'): load_kind(name)\n"
    code += "assert not {'torch', 'transformers', 'sglang'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("read", [load_kind, lambda name: load(None, {"engine.kind": name}, {})])
def test_an_unknown_kind_is_refused_with_the_names_that_are_installed(read, parrot: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"engine\.kind: no kind 'vllm'; installed: .*embedded.*parrot.*sglang, url"
    ):
        read("vllm")


@pytest.mark.parametrize(("name", "says"), [("gone", "cannot be loaded"), ("other", "is no EngineKind")])
def test_a_kind_that_cannot_be_loaded_is_one_line_of_preflight_and_of_doctor(
    name: str, says: str, parrot: Path, tmp_path: Path
) -> None:
    (problem,) = preflight.problems(load(None, {"data_dir": str(tmp_path), "engine.kind": name}, {}))
    assert problem.startswith(f"engine.kind {name!r}: parrot_engine:")
    assert says in problem
    result = CliRunner().invoke(app, ["doctor", "--data-dir", str(tmp_path), "--set", f"engine.kind={name}"])
    assert result.exit_code == 1
    assert problem in result.output


@pytest.mark.parametrize(("device", "gpus"), [("cpu", []), ("cuda", [1]), ("cuda:0", [1]), ("cuda:3", [4])])
def test_a_device_needs_the_gpus_up_to_its_index(device: str, gpus: list[int]) -> None:
    needs = load_kind("embedded").gpus(load(None, {"engine.device": device}, {}))
    assert [need.gpus for need in needs] == gpus
    assert needs == GpuNeed.of_device("engine.device", device)


@pytest.mark.parametrize(
    ("args", "gpus"),
    [
        ([], 1),
        (["--tp", "2"], 2),
        (["--tp-size=4", "--dp", "2"], 8),
        (["--tp", "2", "--pp-size", "2"], 4),
        (["--tp", "8", "--pp-size", "2", "--nnodes", "2"], 8),
        (["--tp", "4", "--dp", "2", "--enable-dp-attention"], 4),
        (["--tp", "many"], 1),
    ],
)
def test_sglang_needs_the_product_of_its_parallel_sizes(args: list[str], gpus: int) -> None:
    (need,) = load_kind("sglang").gpus(load(None, {"engine.kind": "sglang", "engine.args": args}, {}))
    assert need.gpus == gpus


def test_a_kind_without_a_child_needs_a_url(tmp_path: Path) -> None:
    async def on_exit() -> None: ...

    with pytest.raises(SettingsError, match=r"engine\.url is needed"):
        engine_child(EngineKind(), Settings(), DataDir.prepare(tmp_path), on_exit)


def test_a_kind_of_another_package_is_started_asked_and_examined(
    parrot: Path, tmp_path: Path, model_folder: Path, make_model: "Callable[[], LlamaForCausalLM]"
) -> None:
    folder = tmp_path / "model"
    make_model().save_pretrained(folder)  # the server hashes its tensors
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    sets = ["engine.kind=parrot", f"model.path={folder}", "trainer.kind=external"]
    flags = [word for pair in sets for word in ("--set", pair)]
    with RunningServer(tmp_path / "data", flags) as server:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] > 0

    words = ["doctor", "--data-dir", str(tmp_path / "data"), "--set", "server.port=0", *flags]
    good = CliRunner().invoke(app, words)
    assert good.exit_code == 0, good.output
    assert "  parrot             repeats after you" in good.output
    bad = CliRunner().invoke(app, [*words, "--set", "engine.threads=13"])
    assert bad.exit_code == 1
    assert "! engine             engine.threads 13: no parrot has so many" in bad.output
