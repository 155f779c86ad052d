"""One rank of Megatron on CPUs: our loss through slime's own hooks, beside slime's loss and beside plain torch.

    python losses_child.py RANK RANKS tp|cp STORE_FILE BATCH_FILE

BATCH_FILE holds `{"samples": […], "config": …}`. Prints the largest differences as a JSON line.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import mpu
from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp, slice_with_cp
from slime.backends.megatron_utils.data import DataIterator
from slime.backends.megatron_utils.loss import compute_advantages_and_returns, loss_function
from torch import Tensor

from openclaw_rl.methods.base import TokenTerms, load_method
from openclaw_rl.trainer_protocol import SampleBody
from openclaw_rl.types import Sample
from openclaw_slime.node import NodeConfig
from openclaw_slime.rollout import extras_of, train_data_of

VOCABULARY, TEMPERATURE, BATCH = 48, 0.7, 12
KEYS = ["tokens", "total_lengths", "response_lengths", "loss_masks", "ref_log_probs", "advantages", "rollout_log_probs"]


def slime_args(config: NodeConfig) -> Namespace:
    args = Namespace(
        **dict.fromkeys(("recompute_loss_function", "allgather_cp", "calculate_per_token_loss", "use_opsm"), False),
        **dict.fromkeys(("get_mismatch_metrics", "use_unbiased_kl", "normalize_advantages", "use_opd"), False),
        **dict.fromkeys(("eps_clip_c", "custom_tis_function_path", "custom_pg_loss_reducer_function_path")),
        custom_advantage_function_path="openclaw_slime.losses.set_advantages",
        custom_loss_function_path="openclaw_slime.losses.policy_loss",
        rollout_temperature=TEMPERATURE,
        rollout_top_p=1.0,
        log_probs_chunk_size=5,
        vocab_size=VOCABULARY,
        entropy_coef=0.0,
        use_rollout_logprobs=False,
        advantage_estimator="grpo",
        eps_clip=config.trainer.clip_low,
        eps_clip_high=config.trainer.clip_high,
        use_tis=True,
        tis_clip=config.trainer.tis_clip,
        tis_clip_low=0.0,
        use_kl_loss=True,
        kl_coef=0.0,
        kl_loss_coef=config.trainer.kl_coef,
        kl_loss_type="low_var_kl",
    )
    config.attach(args)
    return args


def rollout_data(args: Namespace, data: dict, references: list[Tensor]) -> dict:
    """Convert `train_data` as slime's actor does before the step."""
    lengths = list(zip([len(ids) for ids in data["tokens"]], data["response_lengths"], strict=True))

    def cut(values: list[Tensor]) -> list[Tensor]:
        return [slice_log_prob_with_cp(v, *length) for v, length in zip(values, lengths, strict=True)]

    found = {
        "tokens": [torch.tensor(ids) for ids in data["tokens"]],
        "total_lengths": [total for total, _ in lengths],
        "response_lengths": data["response_lengths"],
        "loss_masks": [torch.tensor(mask, dtype=torch.int) for mask in data["loss_masks"]],
        "rollout_mask_sums": torch.tensor(data["rollout_mask_sums"]),
        "rollout_log_probs": cut([torch.tensor(values) for values in data["rollout_log_probs"]]),
        "ref_log_probs": cut(references),
        "source_names": data["source_names"],
    }
    args.use_rollout_logprobs = True
    compute_advantages_and_returns(args, found)
    args.use_rollout_logprobs = False
    return found


def through_slime(args: Namespace, found: dict, logits: Tensor, loss_type: str) -> tuple[float, Tensor]:
    """Loss and gradient by slime's `loss_function`, on one micro-batch of all samples."""
    batch = DataIterator(found, [list(range(len(found["tokens"])))]).get_next([*KEYS, "log_probs", "rollout_mask_sums"])
    batch["unconcat_tokens"] = batch["tokens"]
    args.loss_type = loss_type
    logits = logits.clone().requires_grad_()
    loss, _, _ = loss_function(args, batch, 1, len(found["tokens"]), logits)
    loss.backward()
    dist.all_reduce(total := loss.detach().clone(), group=mpu.get_context_parallel_group())
    return float(total), logits.grad


def alone(method, config: NodeConfig, sample: Sample, credit, logits: Tensor, reference: Tensor) -> Tensor:
    ids = torch.tensor(sample.response_ids)
    at_one = logits.log_softmax(-1)
    scaled = (logits / sample.temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    wanted = method.gathered_ids(sample)
    terms = TokenTerms(
        log_probs=scaled,
        old_log_probs=scaled.detach(),
        rollout_log_probs=torch.tensor(sample.rollout_log_probs),
        ref_log_probs=reference if sample.temperature == TEMPERATURE else None,
        advantages=torch.tensor(credit),
        loss_mask=torch.tensor(sample.loss_mask),
        unscaled_log_probs=at_one.gather(-1, ids[:, None])[:, 0].detach(),
        gathered_log_probs=None if wanted is None else at_one.gather(-1, torch.tensor(wanted)),
    )
    found = method.loss(sample, terms, config.trainer, config.method)
    return found.loss_sum / found.token_count


def fresh(body: SampleBody, logits: Tensor) -> SampleBody:
    scaled = (logits[len(body.prompt_ids) - 1 : -1] / body.temperature).log_softmax(-1)
    log_probs = scaled.gather(-1, torch.tensor(body.response_ids)[:, None])[:, 0]
    return body.model_copy(update={"rollout_log_probs": log_probs.tolist()})


def main(rank: int, ranks: int, kind: str, store: str, batch_file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{store}")
    name = {"tp": "tensor_model_parallel_size", "cp": "context_parallel_size"}[kind]
    mpu.initialize_model_parallel(**{name: ranks})
    given = json.loads(Path(batch_file).read_text())
    # slime truncates the importance weight and masks nothing.
    trainer = {**given["config"]["trainer"], "tis_mask": 1e9}
    with_kl = NodeConfig.model_validate({**given["config"], "trainer": trainer})
    without_kl = NodeConfig.model_validate({**given["config"], "trainer": {**trainer, "kl_coef": 0.0}})
    bodies = [SampleBody.model_validate(body) for body in given["samples"]]
    config, method = with_kl, load_method(with_kl.method.name)
    samples = [body.to_sample() for body in bodies]
    credit = method.advantages(samples, config.method, {})
    answer = {"rank": rank}

    def compare(
        size: int, chosen: list[int], *, with_slime: bool, config: NodeConfig = with_kl, is_fresh: bool = False
    ) -> dict[str, float]:
        """is_fresh: the engine sampled by the very weights that are trained."""
        args, dice = slime_args(config), torch.Generator().manual_seed(3)
        lengths = [len(bodies[n].prompt_ids) + len(bodies[n].response_ids) for n in chosen]
        fillers = [min(lengths)] * (size - len(chosen))
        whole = [2 * torch.randn(length, VOCABULARY, generator=dice) for length in lengths + fillers]
        mine_bodies = [fresh(bodies[n], whole[k]) if is_fresh else bodies[n] for k, n in enumerate(chosen)]
        data = train_data_of(extras_of(mine_bodies, [credit[n] for n in chosen], size))
        references = [-3.5 - torch.rand(length, generator=dice) for length in data["response_lengths"]]
        columns = VOCABULARY // (ranks if kind == "tp" else 1)
        mine = slice(rank * columns, (rank + 1) * columns) if kind == "tp" else slice(None)

        def local(values: list[Tensor]) -> Tensor:
            return torch.cat([slice_with_cp(v, 0) for v in values])[None, :, mine]

        found, logits = rollout_data(args, data, references), local(whole)
        loss, gradient = through_slime(args, found, logits, "custom_loss")
        plain = [values.requires_grad_() for values in whole]
        expected = sum(
            alone(method, config, body.to_sample(), credit[n], plain[k][len(body.prompt_ids) - 1 : -1], references[k])
            for k, (n, body) in enumerate(zip(chosen, mine_bodies, strict=True))
        ) / len(chosen)
        expected.backward()
        scale = mpu.get_data_parallel_world_size(with_context_parallel=True)  # Megatron averages over these
        wanted = local([torch.zeros_like(v) if v.grad is None else v.grad for v in plain])
        differences = {
            "loss": abs(loss / scale - expected.item()),
            "gradient": float((gradient / scale - wanted).abs().max()),
        }
        if with_slime:
            theirs, their_gradient = through_slime(args, found, logits, "policy_loss")
            differences |= {
                "slime_loss": abs(loss - theirs),
                "slime_gradient": float((gradient - their_gradient).abs().max()),
            }
        return differences

    everything = [n for n, body in enumerate(bodies) if kind == "tp" or "top_k" not in (body.extra or {})]
    verdicts = [n for n, s in enumerate(samples) if s.reward and s.temperature == TEMPERATURE and not s.scored_version]
    verdicts = [n for n in verdicts if samples[n].teacher_log_probs is None]
    answer["partial"] = compare(BATCH, everything, with_slime=False)
    # slime's KL term has no weights for tokens of older versions, so its whole loss is ours on fresh tokens alone.
    answer["verdicts"] = compare(len(verdicts), verdicts, with_slime=True, config=without_kl)
    answer["fresh"] = compare(len(verdicts), verdicts, with_slime=True, is_fresh=True)
    answer["stale"] = compare(len(verdicts), verdicts, with_slime=False)
    sys.stdout.write(json.dumps(answer) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5])
