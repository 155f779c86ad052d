"""`python -m kill FOLDER`: one campaign. Prints what happened as JSON; exit 1 when anything was found."""

import argparse
import asyncio
import json
import secrets
import socket
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from kill.campaign import Campaign
from kill.fork_server import ForkServer
from kill.roles import Place, roles
from kill.toy import make_frontend, make_policy


def main() -> int:
    parser = argparse.ArgumentParser(prog="kill", description=__doc__)
    parser.add_argument("folder", type=Path, help="a new folder; what is left in it tells what happened")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="of the fates; drawn when not given")
    parser.add_argument(
        "--users", type=int, default=0, help="with a policy each, and kills of the engine; 0: one policy"
    )
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    folder: Path = options.folder.absolute()
    (folder / "reports").mkdir(parents=True)
    torch.set_num_threads(1)
    frontend = make_frontend(folder / "tokenizer")
    policy = make_policy(frontend)
    users = tuple(f"user-{number}" for number in range(options.users))
    place = Place(folder / "data", server_port=free_port(), engine_port=free_port(), users=users)
    forks = ForkServer.start(roles(place, frontend, policy))
    outcome = asyncio.run(Campaign(place, forks, policy, seed=seed, kills=options.kills).run())
    print(json.dumps({"seed": seed, **asdict(outcome)}, indent=1))
    return 1 if outcome.findings else 0


def free_port() -> int:
    """Outside the range that the kernel gives to outgoing connections: it must stay free while its server is dead."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


if __name__ == "__main__":
    sys.exit(main())
