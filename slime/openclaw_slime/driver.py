"""The node's trainer as a process: *start → load → loop*.

    python -m openclaw_slime.driver --data-dir DIR [--checkpoint-every 20] [--ray-address HOST:PORT] -- SLIME ARGUMENTS

The driver names its whole checkpoints to the server, which answers with the tip. It starts slime's parts with the tip,
and runs the loop over them (`loop`). Exit 75: the driver is to be started again, from the newest durable version; a
start, step or checkpoint that hangs ends so too. Exit 2: no start can work until a person has changed a setting or the
environment. `launch` starts it again after either, and tells the server.
"""

import argparse
import json
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from openclaw_rl.data_dir import DataDir
from openclaw_rl.errors import OpenClawRLError, TrainerError
from openclaw_rl.trainer_protocol import Started
from openclaw_rl.trainers.client import LeaseSession, ServerGone, TrainerClient
from openclaw_slime.checkpoints import Checkpoints
from openclaw_slime.deadline import deadline
from openclaw_slime.loop import NodeLoop
from openclaw_slime.node import TRAINER, NodeConfig

log = logging.getLogger(__name__)

START_AGAIN = 75
ASK_AGAIN_S = 1.0
START_TIMEOUT_S = 1800.0
"""Longest start of slime's parts. Measured: 40 to 54 s for a 0.6B model."""


def _arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="python -m openclaw_slime.driver", description="The node's trainer.")
    parser.add_argument("--data-dir", type=Path, required=True, help="the server's")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--checkpoint-minutes", type=float, default=30.0, help="of a step that is on no disk, at most")
    parser.add_argument("--start-timeout-s", type=float, default=START_TIMEOUT_S, help="time for Ray and Megatron")
    parser.add_argument("--keep-checkpoints", type=int, default=2, help="of Megatron's")
    parser.add_argument("--push", choices=("nccl", "disk"), default="nccl", help="how weights reach the engines")
    parser.add_argument("--ray-address", help="a running Ray cluster; a local Ray of our own when unset")
    return parser.parse_args(words[:cut]), words[cut + 1 :]


def engine_arguments(urls: Sequence[str], folder: Path | None) -> list[str]:
    """Return slime's arguments for the engines' addresses and the way of the weights. folder: for weights by disk."""
    if folder is None:
        return ["--rollout-external-engine-addrs", *urls]
    # slime writes no weights where it knows no engine. The server gives them to the engines, so one is enough.
    by_disk = ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(folder)]
    return ["--rollout-external-engine-addrs", urls[0], *by_disk]


def _base_of(slime_arguments: Sequence[str]) -> str:
    return slime_arguments[slime_arguments.index("--hf-checkpoint") + 1]


def _server(data: DataDir) -> tuple[str, str]:
    """Return the URL and the trainer token of the running server. Raises TrainerError if none runs."""
    try:
        url = str(json.loads(data.server_file.read_text())["url"])
        return url, (data.keys / "trainer.token").read_text().strip()
    except (OSError, ValueError, KeyError) as error:
        raise TrainerError(f"--data-dir {data.root}: no server runs there ({error})") from error


def _started(client: TrainerClient, checkpoints: Checkpoints, stop: threading.Event, *, by_disk: bool) -> Started:
    """Report the start and the checkpoints on disk to the server, and wait while it, or every engine, is away."""
    while True:
        try:
            return client.start(TRAINER, checkpoints.whole_fences(), writes_files=by_disk)
        except ServerGone:
            if stop.wait(ASK_AGAIN_S):
                raise


def _end_late(client: TrainerClient, timeout_s: float) -> None:
    """End a process whose start hangs; called from another thread."""
    reason = f"Ray and Megatron did not start within {timeout_s:g} s"
    log.error("%s: to be started again", reason)
    try:
        client.failed(TRAINER, reason)
    except TrainerError as error:
        log.warning("the failed start was not reported: %s", error)
    finally:
        os._exit(START_AGAIN)


def _stop_on_signals(stop: threading.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


def main(argv: Sequence[str] | None = None) -> int:
    ours, slime_arguments = _arguments(argv)
    stop = threading.Event()
    _stop_on_signals(stop)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every poll, for days
    try:
        data = DataDir.of(ours.data_dir)
        url, token = _server(data)
        client = TrainerClient(url, token)
        checkpoints = Checkpoints(
            data.root,
            every=ours.checkpoint_every,
            every_s=60 * ours.checkpoint_minutes,
            keep=ours.keep_checkpoints,
        )
        started = _started(client, checkpoints, stop, by_disk=ours.push == "disk")
        # A folder for each driver: an engine that comes back may be reading what the one before has written.
        folder = f"{data.push.name}/{secrets.token_hex(4)}" if ours.push == "disk" else None
        config = NodeConfig(
            url=url,
            token=token,
            trainer=started.trainer,
            method=started.method,
            push_folder=folder,
            engines=started.engines,
        )
        arguments = [
            *slime_arguments,
            *checkpoints.save_arguments(),
            *checkpoints.load_arguments(started.tip, _base_of(slime_arguments)),
            *engine_arguments(started.engine_urls, None if folder is None else data.root / folder),
        ]
        from openclaw_slime.slime_node import SlimeNode  # Ray, slime and Megatron: seconds to import

        fence = checkpoints.fence_of(started.tip)
        with ExitStack() as stack:
            with deadline(ours.start_timeout_s, lambda: _end_late(client, ours.start_timeout_s)):
                begun = SlimeNode.started(arguments, config, ray_address=ours.ray_address, resumed=fence)
                node = stack.enter_context(begun)
            _stop_on_signals(stop)  # again: Ray replaced the handlers
            # Only the end of the process ends a thread that hangs; `launch` starts the next process.
            session = LeaseSession(client, TRAINER, stop, on_hang=lambda: os._exit(START_AGAIN))
            NodeLoop(session, node, config, checkpoints, started.tip).run()
    except TrainerError as error:
        log.warning("to be started again: %s", error)
        return START_AGAIN
    except OpenClawRLError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
