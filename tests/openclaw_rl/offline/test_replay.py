"""Training from a ledger, offline: a model of two layers learns from chats that a real ledger holds, and the same seed
learns the same.

(The bundled model and a running server: `tests/integration/test_loop.py`.)
"""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from turns import make_request, make_turn, serve_turn
from typer.testing import CliRunner

from openclaw_opd.settings import OpdSettings
from openclaw_rl import settings as settings_module
from openclaw_rl.cli.main import app
from openclaw_rl.errors import SettingsError
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.offline.replay import Plan, batches, replay
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import ModelSettings, Settings, TrainingSettings
from openclaw_rl.types import DropReason, Feedback, NextState, Sample, Verdict, VersionRun

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    """Return a folder with a model of two layers of random weights, a byte-level tokenizer and a template."""
    import torch

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["user assistant"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return ModelSettings(path=str(folder))


@pytest.fixture
async def ledger(tmp_path: Path, model: ModelSettings) -> AsyncIterator[Ledger]:
    """Yield a ledger that is open while the tests replay. It holds six judged turns (one of another user), a neutral
    one, one that opted out, one that had grown stale, and a demonstration.
    """
    frontend = FrontEnd(model, Path(model.path))
    ledger = await Ledger.open(
        tmp_path / "data" / "ledger.sqlite3",
        identity=Identity("another base", frontend.tokenizer_hash, "tiny"),
        training=TrainingSettings(),
    )
    for number in range(9):
        name = f"t{number}"
        message = Message(role="user", content=f"question {number}")
        user, prompt = "bob" if number == 5 else "ann", frontend.render([message]).ids
        request = make_request(name, message, user=user, session=f"s{number}", prompt=prompt)
        ids = frontend.reply_ids("so" * (number + 1))
        drop = DropReason.OPTED_OUT if number == 7 else None
        turn = make_turn(
            name,
            ids=ids,
            log_probs=(-5.5,) * len(ids),
            version=number // 4,
            reply="so",
            drop=drop,
            at=10.0 + number,
        )
        await serve_turn(ledger, request, turn)
        following = NextState((Message(role="user", content="No, shorter please."),))
        await ledger.pair(name, following, by_request_id="x")
        if drop is None:
            value = 0 if number == 6 else 1 if number % 2 else -1
            await ledger.record_verdict(name, Verdict(value, (value,), "rules"))
    await ledger.drop("t8", DropReason.STALE)
    said = Feedback("f", "t0", 13.5, None, None, "Sleep.")
    await ledger.record_feedback(said, user="ann", demonstration=frontend.reply_ids("Sleep."))
    yield ledger
    assert await ledger.audit(is_deep=True) == []
    await ledger.aclose()
    kept = {"cache", *(f"ledger.sqlite3{suffix}" for suffix in ("", ".lock", "-wal", "-shm"))}  # a server's own
    assert {file.name for file in (tmp_path / "data").iterdir()} <= kept


@pytest.fixture
def settings(tmp_path: Path, model: ModelSettings, ledger: Ledger) -> Settings:
    return settings_module.load(
        None,
        {
            "data_dir": str(tmp_path / "data"),
            "model.path": model.path,
            "training.batch_size": 3,
            "training.min_batch": 2,
            "trainer.threads": 1,
            "trainer.warmup_steps": 0,
        },
    )


def adapter(folder: Path) -> dict[str, list[float]]:
    return {name: tensor.ravel().tolist() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}


def test_every_turn_that_can_teach_does_and_the_rest_is_counted(settings: Settings, tmp_path: Path) -> None:
    told: list[str] = []
    out = tmp_path / "out"
    report = replay(settings, Plan(out), told.append)
    assert (report.turns, report.samples, report.demonstrations, report.steps) == (9, 8, 1, 3)
    assert report.left_out == {"neutral": 1, "opted_out": 1}
    assert {file.name for file in out.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "metrics.jsonl",
        "replay.json",
    }
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum(row["samples"] for row in rows) == 8
    assert any(value != 0 for name, values in adapter(out).items() if "lora_B" in name for value in values)
    assert told[0] == "9 turns and 1 demonstrations are read"
    assert told[-1].startswith("step 3 of 3: ")
    written = json.loads((out / "replay.json").read_text())
    assert (written["left_out"], written["method"]["name"]) == ({"neutral": 1, "opted_out": 1}, "binary_rl")


def test_distillation_scores_with_an_embedded_engine_of_its_own(settings: Settings, tmp_path: Path) -> None:
    method = OpdSettings(hint_source="verbatim")
    told: list[str] = []
    report = replay(settings.model_copy(update={"method": method}), Plan(tmp_path / "out"), told.append)
    assert "the engine starts" in told
    assert (report.samples, report.demonstrations, report.steps) == (5, 1, 2)  # four corrections
    assert report.left_out == {"method": 4, "opted_out": 1}
    assert not (tmp_path / "data" / "run").exists()  # a server's own engine has its files there


def test_equal_seeds_give_equal_adapters_and_others_do_not(settings: Settings, tmp_path: Path) -> None:
    trained = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        seeded = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"seed": seed})})
        replay(seeded, Plan(tmp_path / name, is_shuffled=True, max_steps=2), lambda _: None)
        trained.append((tmp_path / name / "adapter_model.safetensors").read_bytes())
    assert trained[0] == trained[1] != trained[2]


def test_a_user_or_a_session_can_be_taken_alone(settings: Settings, tmp_path: Path) -> None:
    report = replay(settings, Plan(tmp_path / "bob", user="bob"), lambda _: None)
    assert (report.turns, report.samples, report.demonstrations) == (1, 1, 0)
    report = replay(settings, Plan(tmp_path / "s0", session_id="s0"), lambda _: None)
    assert (report.turns, report.samples, report.demonstrations) == (1, 2, 1)
    with pytest.raises(SettingsError, match="nothing to train on: 1 neutral"):
        replay(settings, Plan(tmp_path / "s6", session_id="s6"), lambda _: None)
    assert not (tmp_path / "s6").exists()


def test_a_model_of_another_template_is_refused(settings: Settings, tmp_path: Path, model: ModelSettings) -> None:
    template = tmp_path / "other.jinja"
    template.write_text(TEMPLATE.replace("im_start", "im_begin"))
    other = settings.model_copy(update={"model": model.model_copy(update={"chat_template": str(template)})})
    with pytest.raises(SettingsError, match="is not that of the ledger"):
        replay(other, Plan(tmp_path / "out"), lambda _: None)


def test_what_is_there_is_not_overwritten(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="exists already"):
        replay(settings, Plan(tmp_path), lambda _: None)


def test_the_command_says_what_it_did(settings: Settings, tmp_path: Path, model: ModelSettings) -> None:
    args = ["--data-dir", str(tmp_path / "data"), "--model", model.path, "--batch-size", "8", "--seed", "3"]
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "out"), *args, "--set", "trainer.threads=1"])
    assert result.exit_code == 0, result.output
    assert "1 steps on 8 samples; the adapter is in" in result.output
    assert "1 turns left out: neutral" in result.output
    assert json.loads((tmp_path / "out" / "replay.json").read_text())["trainer"]["seed"] == 3


def sample(name: str) -> Sample:
    return Sample(name, (1,), (2,), (True,), (-1.0,), (VersionRun(0, 1),), 1.0)


def test_batches_hold_every_sample_once_an_epoch() -> None:
    samples = [sample(str(n)) for n in range(7)]
    plan = Plan(Path("x"), epochs=2)
    in_order = list(batches(samples, 3, plan, seed=0))
    assert [len(batch) for batch in in_order] == [3, 3, 1] * 2
    assert [s for batch in in_order for s in batch] == samples * 2
    shuffled = list(batches(samples, 3, replace(plan, is_shuffled=True), seed=0))
    drawn = [s.sample_id for batch in shuffled for s in batch]
    assert sorted(drawn[:7]) == sorted(drawn[7:]) == [s.sample_id for s in samples]
    assert drawn[:7] != drawn[7:]
    assert [len(batch) for batch in batches(samples, 3, replace(plan, max_steps=2), seed=0)] == [3, 3]
