"""One of two ranks: `python lease_guard_child.py RANK STATUS STORE_FILE` prints if the lease is over for it.

Its own server answers with STATUS.
"""

import json
import sys

import httpx
import torch.distributed as dist

from openclaw_rl.trainer_protocol import LeaseRef
from openclaw_rl.trainers.client import TrainerClient
from openclaw_slime.lease_guard import is_over_for_all


def main(rank: int, status: int, store: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    server = httpx.MockTransport(lambda _: httpx.Response(status, json={"expires_at": 1.0}))
    client = TrainerClient("http://server", "t", transport=server)
    found = is_over_for_all(client, LeaseRef(lease_id="lease-7-x", fence=7), dist.group.WORLD)
    sys.stdout.write(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
