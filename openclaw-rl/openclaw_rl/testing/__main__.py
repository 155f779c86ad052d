"""`python -m openclaw_rl.testing`: the stub engine as a process."""

import argparse
import json
import os
import socket
from pathlib import Path

import uvicorn

from openclaw_rl.testing.fake_engine import FakeEngine, Pacing
from openclaw_rl.testing.stub_engine import stub_app
from openclaw_rl.testing.toy_policy import ToyPolicy


def main() -> None:
    parser = argparse.ArgumentParser(prog="openclaw_rl.testing", description="A stub engine that speaks the dialect.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--port-file", type=Path, help='written when listening: {"url": …, "pid": …}')
    parser.add_argument("--tokens-per-s", type=float, default=50.0, help="of one stream; 0: as fast as it goes")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=0.0, help="0: at once")
    parser.add_argument("--mean-tokens", type=int, default=64, help="mean length of a reply; 0: max_new_tokens")
    parser.add_argument("--end-id", type=int, default=2)
    parser.add_argument("--low-id", type=int, default=300, help="smallest id of a reply")
    parser.add_argument("--high-id", type=int, default=2000, help="replies have ids below this one")
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--spread", type=float, default=0.2, help="largest difference between two adapters, in nats")
    args = parser.parse_args()
    engine = FakeEngine(
        policy=ToyPolicy(args.low_id, args.high_id, args.end_id, args.mean_tokens, args.spread),
        context_length=args.context_length,
        pacing=Pacing(prefill_tokens_per_s=args.prefill_tokens_per_s, tokens_per_s=args.tokens_per_s),
    )
    listener = socket.create_server((args.host, args.port), backlog=1024)
    if args.port_file is not None:
        url = f"http://{args.host}:{listener.getsockname()[1]}"
        fresh = args.port_file.with_suffix(".tmp")
        fresh.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        fresh.rename(args.port_file)
    config = uvicorn.Config(stub_app(engine), log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
