"""Our methods' losses on a packed micro-batch, beside the same losses on each sample alone over a whole vocabulary."""

from dataclasses import replace

import pytest
import torch
from close import assert_close
from tolerances import rel
from torch import Tensor

from openclaw_rl.methods.base import TokenTerms, load_method
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainer_protocol import SampleBody
from openclaw_rl.types import Sample, VersionRun
from openclaw_slime.losses import Piece, batch_loss
from openclaw_slime.rollout import extras_of, train_data_of
from openclaw_slime.rows import Row, ride, row_of, share_of
from openclaw_slime.vocab_parallel import VocabShard

VOCABULARY = 48


def pieces_of(samples, credit, batch_size, reference=None) -> tuple[list[Piece], list[Tensor]]:
    """The rows of a batch as they lie in one packed stream, and where each one's predictions are."""
    data = train_data_of(extras_of([SampleBody.of(sample) for sample in samples], credit, batch_size))
    pieces, places, start = [], [], 0
    for n, text in enumerate(data["source_names"]):
        row = Row.of(text)
        total, response = len(data["tokens"][n]), data["response_lengths"][n]
        at = torch.arange(start + total - response - 1, start + total - 1)
        ids = torch.tensor(data["tokens"][n][-response:])
        values = ride(torch.tensor(row.credit), row)
        ref = None if reference is None or row.is_filler else reference[n]
        pieces.append(Piece(row_of(values), at, ids, values, range(response), data["rollout_mask_sums"][n], ref))
        places.append(at)
        start += total
    return pieces, places


def alone(method, config, sample: Sample, credit, logits: Tensor, reference: Tensor | None) -> Tensor:
    """The mean over one sample's trained tokens, by plain torch."""
    ids = torch.tensor(sample.response_ids)
    scaled = (logits / sample.temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    at_one = logits.log_softmax(-1)
    wanted = method.gathered_ids(sample)
    terms = TokenTerms(
        log_probs=scaled,
        old_log_probs=scaled.detach(),
        rollout_log_probs=torch.tensor(sample.rollout_log_probs),
        ref_log_probs=reference if sample.temperature == 0.7 else None,
        advantages=torch.tensor(credit),
        loss_mask=torch.tensor(sample.loss_mask),
        unscaled_log_probs=at_one.gather(-1, ids[:, None])[:, 0].detach(),
        gathered_log_probs=None if wanted is None else at_one.gather(-1, torch.tensor(wanted)),
    )
    found = method.loss(sample, terms, config.trainer, config.method)
    return found.loss_sum / found.token_count


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("batch_size", [6, 16])
def test_loss_and_gradient_are_those_of_each_sample_alone(node_config, every_kind, batch_size, kl_coef):
    """A batch of six in a step of sixteen is a batch of six: slime divides by sixteen."""
    config, method = node_config(kl_coef=kl_coef), load_method("combine")
    credit = method.advantages(every_kind, config.method, {})
    reference = [torch.full((len(s.response_ids),), -3.6) for s in every_kind] if kl_coef else None
    pieces, places = pieces_of(every_kind, credit, batch_size, reference)
    tokens = max(int(at[-1]) for at in places) + 2
    logits = (2 * torch.randn(tokens, VOCABULARY, generator=torch.Generator().manual_seed(0))).requires_grad_()
    loss = batch_loss(method, config, pieces, logits, VocabShard(), chunk=5, reference_temperature=0.7) / batch_size
    loss.backward()
    got, logits.grad = logits.grad, None
    expected = sum(
        alone(method, config, sample, values, logits[at], None if reference is None else reference[n])
        for n, (sample, values, at) in enumerate(zip(every_kind, credit, places, strict=False))
    ) / len(every_kind)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=rel(ulps=256))
    assert_close(got, logits.grad, ulps=256)
    assert share_of([p.row for p in pieces], stepped=True, counts=True).loss == pytest.approx(
        loss.item() * batch_size, rel=rel(ulps=256)
    )


def test_how_the_batch_is_cut_changes_nothing(node_config, every_kind):
    config, method = node_config(), load_method("combine")
    credit = method.advantages(every_kind, config.method, {})
    pieces, places = pieces_of(every_kind, credit, 6)
    tokens = int(places[-1][-1]) + 2
    logits = (2 * torch.randn(tokens, VOCABULARY, generator=torch.Generator().manual_seed(1))).requires_grad_()
    batch_loss(method, config, pieces, logits, VocabShard()).backward()
    whole, logits.grad = logits.grad, None
    for piece in pieces:
        batch_loss(method, config, [piece], logits, VocabShard()).backward()
    assert_close(whole, logits.grad, ulps=256)


def test_fillers_have_no_gradient_but_a_graph(node_config, every_kind):
    config = node_config()
    pieces, _ = pieces_of(every_kind[:1], [[1.0] * 5], 3)
    logits = torch.randn(40, VOCABULARY, requires_grad=True)
    loss = batch_loss(load_method("combine"), config, pieces[1:], logits, VocabShard())
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_a_nan_names_its_sample_and_makes_the_step_not_finite(node_config, every_kind):
    """slime then leaves the step out on every rank; the driver drops who was at fault."""
    config, method = node_config(), load_method("combine")
    credit = method.advantages(every_kind, config.method, {})
    pieces, places = pieces_of(every_kind, credit, 6)
    logits = torch.randn(int(places[-1][-1]) + 2, VOCABULARY)
    logits[places[2][1]] = torch.nan
    loss = batch_loss(method, config, pieces, logits.requires_grad_(), VocabShard())
    assert torch.isnan(loss)
    share = share_of([piece.row for piece in pieces], stepped=False, counts=True)
    assert share.not_finite == ("both",)


def test_a_reference_of_another_temperature_gives_no_kl(node_config, every_kind):
    config, method = node_config(kl_coef=1.0), load_method("combine")
    hint = every_kind[1:2]  # at temperature 1
    pieces, places = pieces_of(hint, [[1.0] * 4], 1, [torch.full((4,), -9.0)])
    logits = torch.randn(int(places[-1][-1]) + 2, VOCABULARY)
    batch_loss(method, config, pieces, logits, VocabShard(), reference_temperature=0.7)
    assert "ref_kl" not in pieces[0].row.tallies
    batch_loss(method, config, pieces, logits, VocabShard(), reference_temperature=1.0)
    assert "ref_kl" in pieces[0].row.tallies


def test_the_gap_to_the_engine_is_taken_on_what_the_version_itself_sampled(every_kind):
    """Tokens of older versions differ for another reason."""
    sample = replace(every_kind[0], versions=(VersionRun(2, 2), VersionRun(3, 3)))
    (extras,) = extras_of([SampleBody.of(sample)], [[1.0] * 5], 1, parent=3)
    assert Row.of(extras.model_dump_json()).is_fresh == [False, False, True, True, True]
    (extras,) = extras_of([SampleBody.of(every_kind[5])], [[1.0] * 3], 1, parent=0)
    assert not any(Row.of(extras.model_dump_json()).is_fresh)


def clipped_surrogate(sample: Sample, reward: float, logits: Tensor, trainer: TrainerSettings) -> Tensor:
    """The mean over the trained tokens of the dual-clipped surrogate against the engine's log-probs, in float64."""
    ids = torch.tensor(sample.response_ids)
    log_probs = (logits / sample.temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    total, count = log_probs.new_zeros(()), 0
    for t, is_trained in enumerate(sample.loss_mask):
        if not is_trained:
            continue
        ratio = (log_probs[t] - sample.rollout_log_probs[t]).exp()
        clipped = ratio.clamp(1 - trainer.clip_low, 1 + trainer.clip_high)
        gain = torch.minimum(ratio * reward, clipped * reward)
        if reward < 0:
            gain = torch.maximum(gain, torch.tensor(3.0 * reward, dtype=gain.dtype))
        total, count = total - gain, count + 1
    return total / count


@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_old_log_probs_of_the_rollout_are_those_of_the_clipped_surrogate(node_config, verdicts, old):
    """With `recompute` the ratio is one, and the gradient another."""
    config = node_config("binary_rl")
    trainer = config.trainer.model_copy(update={"old_log_probs": old})
    config = config.model_copy(update={"trainer": trainer})
    method, credit = load_method("binary_rl"), [[sample.reward] * len(sample.response_ids) for sample in verdicts]
    pieces, places = pieces_of(verdicts, credit, len(verdicts))
    logits = (2 * torch.randn(int(places[-1][-1]) + 2, VOCABULARY, generator=torch.Generator().manual_seed(2))).double()
    ours, plain = logits.float().requires_grad_(), logits.clone().requires_grad_()
    (batch_loss(method, config, pieces, ours, VocabShard()) / len(verdicts)).backward()
    surrogates = [
        clipped_surrogate(s, c[0], plain[at], trainer) for s, c, at in zip(verdicts, credit, places, strict=True)
    ]
    (sum(surrogates) / len(verdicts)).backward()
    difference = float((ours.grad - plain.grad).abs().max())
    assert difference < 1e-6 if old == "rollout" else difference > 1e-2
