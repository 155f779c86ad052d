"""The policy: its log-probs are a plain forward pass's, its adapter is PEFT's, its base is never touched."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from close import assert_close, largest
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from openclaw_rl.errors import SettingsError, TrainerError
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.batches import micro_batches, rows_of
from openclaw_rl.trainers.lora import ADAPTER_FILE, LoraPolicy
from openclaw_rl.types import Sample

MakeModel = Callable[..., LlamaForCausalLM]


def stir(policy: LoraPolicy, scale: float = 0.3) -> None:
    """An adapter that changes the policy by more than a nat here and there."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * scale)


@torch.no_grad()
def plain(model: torch.nn.Module, sample: Sample) -> Tensor:
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits = model(input_ids=ids).logits[0].float() / sample.temperature
    log_probs = torch.log_softmax(logits[len(sample.prompt_ids) - 1 : -1], -1)
    return log_probs.gather(-1, torch.tensor(sample.response_ids)[:, None]).squeeze(-1)


def all_log_probs(
    policy: LoraPolicy, samples: Sequence[Sample], budget: int, *, recompute: bool = False
) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for batch in micro_batches(rows_of(samples), budget):
        found |= policy.log_probs(batch, recompute=recompute)
    return [found[index] for index in range(len(samples))]


@pytest.mark.parametrize("budget", [1, 20, 1000])
@pytest.mark.parametrize("recompute", [False, True])
def test_log_probs_equal_a_plain_forward_pass(
    make_model: MakeModel, settings: TrainerSettings, batch: list[Sample], budget: int, recompute: bool
) -> None:
    policy = LoraPolicy(make_model(), settings)
    stir(policy)
    ours = all_log_probs(policy, batch, budget, recompute=recompute)
    for sample, log_probs in zip(batch, ours, strict=True):
        mask = torch.tensor(sample.loss_mask)
        assert_close(log_probs[mask], plain(policy.model, sample)[mask])
        assert (log_probs[~mask] == 0).all()


def test_turns_in_one_row_have_the_numbers_they_have_alone(
    make_model: MakeModel, settings: TrainerSettings, make_sample: Callable[..., Sample]
) -> None:
    policy = LoraPolicy(make_model(), settings)
    stir(policy)
    first = make_sample("first", prompt=4, response=3)
    second = make_sample("second", prompt=(*first.prompt_ids, *first.response_ids, 9, 9), response=3, temperature=1.0)
    for sample, log_probs in zip([first, second], all_log_probs(policy, [first, second], 1000), strict=True):
        assert_close(log_probs, plain(policy.model, sample))


@pytest.mark.parametrize("budget", [1, 1000])
def test_other_ids_stand_in_their_own_tokens_places(
    make_model: MakeModel, settings: TrainerSettings, make_sample: Callable[..., Sample], budget: int
) -> None:
    """Off by one in either direction, or a row of another sample, would be another token's numbers (D7)."""
    policy = LoraPolicy(make_model(), settings)
    stir(policy)
    first = make_sample("first", prompt=4, response=3, mask=(True, False, True))
    samples = [
        first,
        make_sample("second", prompt=(*first.prompt_ids, *first.response_ids, 9, 9), response=1),  # shares the row
        make_sample("third", prompt=2, response=6, temperature=1.0),
        make_sample("none", prompt=5, response=2),
    ]
    tables = [[tuple((7 * t + 5 * k + n) % 64 for k in range(2 + n)) for t in range(6)] for n in range(3)]  # K differs
    gather = {n: tables[n][: len(samples[n].response_ids)] for n in range(3)}
    found = {}
    for batch in micro_batches(rows_of(samples), budget):
        found |= policy.token_log_probs(batch, gather=gather, unscaled=True)
    for n, sample in enumerate(samples):
        ids, start = sample.prompt_ids + sample.response_ids, len(sample.prompt_ids)
        with torch.no_grad():
            table = torch.log_softmax(policy.model(input_ids=torch.tensor([ids])).logits[0].float(), -1)
        for k, is_trained in enumerate(sample.loss_mask):
            unscaled, gathered = found[n].unscaled, found[n].gathered
            assert unscaled is not None
            row = table[start + k - 1]
            expected = row[ids[start + k]] if is_trained else torch.zeros(())
            assert_close(unscaled[k], expected)
            if n not in gather:
                assert gathered is None
                continue
            assert gathered is not None
            wanted = row[list(gather[n][k])] if is_trained else torch.zeros(2 + n)
            assert_close(gathered[k].detach(), wanted)


def test_recomputation_changes_no_gradient(
    make_model: MakeModel, settings: TrainerSettings, batch: list[Sample]
) -> None:
    def gradients(recompute: bool) -> list[Tensor]:
        policy = LoraPolicy(make_model(dtype=torch.float64), settings)
        stir(policy)
        sum(values.sum() for values in all_log_probs(policy, batch, 1000, recompute=recompute)).backward()  # type: ignore[union-attr]
        return [parameter.grad for parameter in policy.parameters.values() if parameter.grad is not None]

    kept, recomputed = gradients(False), gradients(True)
    assert len(kept) == len(recomputed) == 2 * 2 * 7  # A and B of seven modules in two layers
    for a, b in zip(kept, recomputed, strict=True):
        assert_close(a, b, ulps=2**14, scale=largest(kept))


def test_a_new_adapter_changes_nothing_and_comes_from_its_seed(
    make_model: MakeModel, settings: TrainerSettings, batch: list[Sample]
) -> None:
    policy, twin = LoraPolicy(make_model(), settings), LoraPolicy(make_model(), settings)
    policy.reset(3)
    torch.manual_seed(99)
    twin.reset(3)
    for (name, a), b in zip(policy.parameters.items(), twin.parameters.values(), strict=True):
        assert torch.equal(a, b)
        assert bool((a == 0).all()) == (".lora_B." in name)
    twin.reset(4)
    assert not all(torch.equal(a, b) for a, b in zip(policy.parameters.values(), twin.parameters.values(), strict=True))
    base = make_model()
    for sample, log_probs in zip(batch, all_log_probs(policy, batch, 1000), strict=True):
        mask = torch.tensor(sample.loss_mask)
        assert_close(log_probs[mask], plain(base, sample)[mask])


def test_the_reference_is_the_base(make_model: MakeModel, settings: TrainerSettings, batch: list[Sample]) -> None:
    policy = LoraPolicy(make_model(), settings)
    stir(policy)
    base = make_model()
    with policy.reference():
        referenced = all_log_probs(policy, batch, 1000)
    for sample, log_probs in zip(batch, referenced, strict=True):
        mask = torch.tensor(sample.loss_mask)
        assert_close(log_probs[mask], plain(base, sample)[mask])
        assert not log_probs.requires_grad
    assert all_log_probs(policy, batch, 1000)[0].requires_grad


def test_the_folder_is_one_that_peft_loads(
    make_model: MakeModel, settings: TrainerSettings, batch: list[Sample], tmp_path: Path
) -> None:
    policy = LoraPolicy(make_model(), settings)
    stir(policy)
    policy.save(tmp_path)
    names = set(load_file(tmp_path / ADAPTER_FILE))
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in names
    assert "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight" in names
    loaded = PeftModel.from_pretrained(make_model(), tmp_path)
    for sample in batch:
        assert_close(plain(loaded, sample), plain(policy.model, sample))
    assert str(tmp_path) not in (tmp_path / "adapter_config.json").read_text()  # no path of this machine

    again = LoraPolicy(make_model(), settings)
    again.load(tmp_path)
    for a, b in zip(policy.parameters.values(), again.parameters.values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rank": 3}, "trainer.rank is 3, and it was made with 4"),
        ({"alpha": 5.0}, "trainer.alpha is 5, and it was made with 8"),  # the tensors have the same shapes
        ({"alpha": 8.5}, "trainer.alpha is 8.5, and it was made with 8"),
        ({"rank": 8, "alpha": 16.0}, "trainer.rank is 8, and it was made with 4; trainer.alpha is 16"),
        ({"target_modules": ("q_proj", "v_proj")}, "trainer.target_modules are q_proj, v_proj, and it was made with"),
    ],
)
def test_an_adapter_that_the_settings_do_not_describe_is_refused_by_their_names(
    make_model: MakeModel, settings: TrainerSettings, tmp_path: Path, changed: dict, says: str
) -> None:
    made = settings.model_copy(update={"rank": 4, "alpha": 8.0})
    policy = LoraPolicy(make_model(), made)
    policy.reset(0)
    policy.save(tmp_path)
    with pytest.raises(TrainerError, match="this adapter is of another form: ") as refused:
        LoraPolicy(make_model(), made.model_copy(update=changed)).load(tmp_path)
    assert says in str(refused.value)
    policy.load(tmp_path)  # what it was made with is fine


def test_an_adapter_without_numbers_or_of_another_model_is_refused(
    make_model: MakeModel, settings: TrainerSettings, tmp_path: Path
) -> None:
    policy = LoraPolicy(make_model(), settings)
    policy.reset(0)
    policy.save(tmp_path)
    tensors = load_file(tmp_path / ADAPTER_FILE)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, tmp_path / ADAPTER_FILE)
    with pytest.raises(TrainerError, match="not finite"):
        policy.load(tmp_path)
    tensors.popitem()
    save_file(tensors, tmp_path / ADAPTER_FILE)
    with pytest.raises(TrainerError, match="another rank"):
        policy.load(tmp_path)


def test_other_architectures_get_all_their_linear_layers(settings: TrainerSettings, batch: list[Sample]) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5, attn_pdrop=0.5)
    model = GPT2LMHeadModel(config)
    policy = LoraPolicy(model, settings)
    assert any("c_attn" in name for name in policy.parameters)
    assert not any("lm_head" in name for name in policy.parameters)
    for recompute in (False, True):  # dropout must act in neither
        for sample, log_probs in zip(batch, all_log_probs(policy, batch, 1000, recompute=recompute), strict=True):
            mask = torch.tensor(sample.loss_mask)
            assert_close(log_probs[mask], plain(policy.model, sample)[mask])


def test_a_module_name_that_the_user_gave_must_exist(make_model: MakeModel, settings: TrainerSettings) -> None:
    wrong = settings.model_copy(update={"target_modules": ("q_proj", "qq_proj")})
    with pytest.raises(SettingsError, match=r"no qq_proj; its linear layers are .*k_proj"):
        LoraPolicy(make_model(), wrong)
    few = LoraPolicy(make_model(), settings.model_copy(update={"target_modules": ("q_proj", "v_proj")}))
    assert len(few.parameters) == 2 * 2 * 2


def test_a_pass_can_be_broken_off_at_any_layer(
    make_model: MakeModel, settings: TrainerSettings, batch: list[Sample]
) -> None:
    policy = LoraPolicy(make_model(), settings)
    calls = 0

    def between() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise InterruptedError

    policy.between = between
    with pytest.raises(InterruptedError):
        all_log_probs(policy, batch, 1000)
    assert calls == 2
