"""Files on disk are readable for their owner alone, whatever the umask, and are never run as code."""

import ast
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import openclaw_rl
from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.models import resolve
from openclaw_rl.offline import export, replay
from openclaw_rl.proxy.template import load_chat_format
from openclaw_rl.settings import ModelSettings

ROOT = Path(openclaw_rl.__file__).parents[2]
PACKAGES = [ROOT / "openclaw-rl", ROOT / "openclaw-opd", ROOT / "openclaw-combine", ROOT / "slime", ROOT / "scripts"]


def test_all_that_a_server_writes_is_private_under_an_open_umask(keyed):
    """`keyed` runs with umask 0."""
    keyed.chat("ann")
    open_to_others = {
        path.relative_to(keyed.server.data_dir).as_posix(): oct(path.stat().st_mode)
        for path in (keyed.server.data_dir, *keyed.server.data_dir.rglob("*"))
        if not path.is_symlink() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    }
    assert open_to_others == {}


def test_copies_that_leave_the_data_directory_are_private_too(keyed, tmp_path):
    from openclaw_rl.ledger.snapshot import backup

    ledger = keyed.server.data_dir / "ledger.sqlite3"
    before = os.umask(0)
    try:
        export.export(ledger, tmp_path / "turns.jsonl", what="turns", format="jsonl")
        export.export(ledger, tmp_path / "turns.parquet", what="turns", format="parquet")
        backup(ledger, tmp_path / "copy.sqlite3")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    assert "0o700" in Path(replay.__file__).read_text()


FORBIDDEN = {
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "torch.save",
    "joblib.load",
    "marshal.loads",
    "shelve.open",
    "yaml.load",
    "eval",
    "exec",
    "os.system",
    "os.popen",
}
OWN_EXPRESSIONS = {"openclaw-rl/openclaw_rl/agents/environments/swe_mini.py: eval"}
"""The miniature's bugs are expressions of the package itself. No text of a model or a user reaches that call."""


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell():
    found = []
    for package in PACKAGES:
        for file in package.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                name, words = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
                if name == "torch.load" and words.get("weights_only") == "True":
                    continue
                if name in FORBIDDEN or words.get("shell") == "True" or words.get("trust_remote_code") == "True":
                    found.append(f"{file.relative_to(ROOT)}: {name}")
    assert set(found) == OWN_EXPRESSIONS
    assert len(found) == len(OWN_EXPRESSIONS)


CODE = "from pathlib import Path\nPath({marker!r}).write_text('ran')\n"


def test_code_beside_a_models_weights_is_not_run(tmp_path):
    """`auto_map` asks transformers to import a file of the folder."""
    folder, marker = tmp_path / "model", tmp_path / "marker"
    folder.mkdir()
    auto_map = {
        "AutoConfig": "evil.Config",
        "AutoModelForCausalLM": "evil.Model",
        "AutoTokenizer": ["evil.T", "evil.T"],
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map, "tokenizer_class": "T"}))
    (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
    save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    resolved = resolve.resolve(ModelSettings(path=str(folder)), tmp_path / "cache")
    for load in (lambda: resolve.load_model(resolved), lambda: load_chat_format(ModelSettings(), folder)):
        with pytest.raises((ValueError, OSError, OpenClawRLError, KeyError, AttributeError, ImportError)):
            load()
    assert not marker.exists()


class Evil:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self):
        return Path.write_text, (self._marker, "ran")


def test_a_pickle_in_place_of_weights_is_not_loaded(tmp_path):
    import pickle

    folder, marker = tmp_path / "model", tmp_path / "marker"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 1}))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises((OpenClawRLError, OSError, ValueError, pickle.UnpicklingError)):
        resolve.load_model(resolve.resolve(ModelSettings(path=str(folder)), tmp_path / "cache"))
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil(marker)))  # it would have
    assert marker.exists()
