"""One rank of a cut vocabulary: `python vocab_child.py RANK RANKS STORE_FILE` prints its largest difference from the
whole one, values and gradients."""

import json
import sys

import torch
import torch.distributed as dist

from openclaw_slime.vocab_parallel import VocabShard, gathered_log_probs

N, V, PADDED, K = 7, 22, 24, 3


def main(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{store}")
    dice = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(N, PADDED, generator=dice, dtype=torch.float64)
    ids = torch.randint(0, V, (N, K), generator=dice)
    ids[0] = torch.tensor([0, V // 2, V - 1])  # the edges of the parts
    temperature = torch.rand(N, generator=dice, dtype=torch.float64) + 0.3
    weight = torch.randn(N, K, generator=dice, dtype=torch.float64)

    whole = logits[:, :V].clone().requires_grad_()
    expected = (whole / temperature[:, None]).log_softmax(-1).gather(-1, ids)
    (expected * weight).sum().backward()

    columns = PADDED // ranks
    part = logits[:, rank * columns : (rank + 1) * columns].clone().requires_grad_()
    shard = VocabShard.of(dist.group.WORLD, columns, V)
    found = gathered_log_probs(part, ids, temperature, shard, chunk=3)
    (found * weight).sum().backward()
    gradient = torch.nn.functional.pad(whole.grad, (0, PADDED - V))[:, rank * columns : (rank + 1) * columns]
    worst = max(float((found - expected).abs().max()), float((part.grad - gradient).abs().max()))
    sys.stdout.write(json.dumps({"rank": rank, "difference": worst}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
