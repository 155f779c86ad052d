"""The output that a sandbox keeps of a command: its head and its tail, and how much is missing between them."""

import pytest

from openclaw_rl.agents.sandbox.process_one import _Kept

WHOLE = bytes(range(256)) * 8


@pytest.mark.parametrize("piece", [1, 7, 64, 100, 127, 128, 129, 500, 2048])
@pytest.mark.parametrize("length", [0, 1, 99, 100, 101, 150, 200, 201, 300, 301, 1000, 2048])
def test_what_is_missing_is_told_whatever_the_pieces_are(piece: int, length: int) -> None:
    said, kept = WHOLE[:length], _Kept(200)
    for at in range(0, length, piece):
        kept.add(said[at : at + piece])
    if length <= 200:
        assert kept.content() == said
    else:
        mark = b"\n[... %d bytes left out ...]\n" % (length - 200)
        assert kept.content() == said[:100] + mark + said[-100:]
