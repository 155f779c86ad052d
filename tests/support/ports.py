"""A port for a process that a test starts, where the test must know it before."""

import random
import socket

_LOWEST, _HIGHEST = 20_000, 32_000
"""Below the ports that Linux gives to whoever asks for any: no client and no other server gets it meanwhile."""


def free_port() -> int:
    chance = random.SystemRandom()
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", chance.randrange(_LOWEST, _HIGHEST)))
            except OSError:
                continue
            return int(probe.getsockname()[1])
