"""Replies under a foreign adapter: a tiny model, its adapters, and replies with the log-probs of one of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gpu import foreign, models
from gpu.foreign import Said
from gpu.models import Forced

PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5, 4])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, tie_word_embeddings=False, **sizes))
    with torch.no_grad():
        model.lm_head.weight.mul_(5)  # logits that an adapter can move
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp(name) for name in ("ann", "bob")]
    assert min(models.synthetic_adapters(base, folders, 0, "cpu", 0.5)) > 0.5
    return folders


@pytest.fixture(scope="module")
def replies(base: Path, adapters: list[Path]) -> list[Said]:
    """Replies of versions 1 and 2, which are ann's and bob's, and of version 3, ann's base."""
    found = []
    for version, user, folder in ((1, "ann", adapters[0]), (2, "bob", adapters[1]), (3, "ann", None)):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        policy = model if folder is None else PeftModel.from_pretrained(model, folder).eval()
        for number, prompt in enumerate(PROMPTS):
            reply = Forced(list(prompt), list(range(20, 44 + number)), [], 0.8)
            log_probs = models.forced_log_probs(policy, reply, "cpu").tolist()
            found.append(Said(f"{user}-{version}-{number}", user, (version,), replace(reply, log_probs=log_probs)))
    return found


@pytest.fixture
def versions(adapters: list[Path]) -> dict[int, tuple[str, Path | None]]:
    return {1: ("user:ann", adapters[0]), 2: ("user:bob", adapters[1]), 3: ("user:ann", None)}


def test_replies_of_their_own_users_versions_are_not_foreign(
    base: Path, replies: list[Said], versions: dict[int, tuple[str, Path | None]]
) -> None:
    figures = foreign.scored(replies, versions, base, "cpu", 60)
    assert (figures["replies scored"], figures["replies under a foreign adapter"]) == (6, 0)
    assert figures["own adapter: mean |Δ log-prob| p50/p99/max, nats a token"][2] < 1e-4
    assert foreign.findings(figures) == []


def test_a_reply_under_another_users_adapter_is_foreign_by_its_log_probs_and_by_its_version(
    base: Path, replies: list[Said], versions: dict[int, tuple[str, Path | None]]
) -> None:
    by_weights = replace(replies[2], turn_id="weights", user="ann", versions=(1,))
    by_version = replace(replies[2], turn_id="version", user="ann")
    of_two = replace(replies[0], turn_id="two", versions=(1, 3))
    figures = foreign.scored([*replies, by_weights, by_version, of_two], versions, base, "cpu", 60)
    assert figures["replies under a foreign adapter"] == 3
    assert {said.partition(" ")[0] for said in figures["foreign"]} == {"weights", "version", "two"}
    assert len(foreign.findings(figures)) == 3


def test_adapters_that_are_too_near_to_tell_are_a_finding(
    base: Path, replies: list[Said], versions: dict[int, tuple[str, Path | None]]
) -> None:
    near = {**versions, 2: ("user:bob", versions[1][1])}
    copies = [replace(reply, user="bob", versions=(2,)) for reply in replies[:2]]
    (finding,) = foreign.findings(foreign.scored([*replies[:2], *copies], near, base, "cpu", 60))
    assert finding.startswith("the adapters are too near to tell")
    (none, _) = foreign.findings(foreign.scored([], versions, base, "cpu", 60))
    assert none == "no reply was scored"


def test_a_pass_holds_rows_of_about_one_length_within_its_tokens() -> None:
    rows = [Forced([1] * length, [2], [], 1.0) for length in (9, 1, 5, 2, 30)]
    batches = list(foreign._batches(rows, 12))
    assert [[len(rows[at].prompt_ids) for at in batch] for batch in batches] == [[1, 2], [5], [9], [30]]
    assert sorted(at for batch in batches for at in batch) == list(range(5))
    assert all(
        len(batch) == 1 or len(batch) * max(len(rows[at].prompt_ids) + 1 for at in batch) <= 12 for batch in batches
    )
