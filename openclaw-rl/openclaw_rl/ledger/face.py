"""What the parts of the ledger's async face have in common: the threads that they put their work on, and the time."""

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from openclaw_rl.ledger.masks import Masks
from openclaw_rl.ledger.reader import Reader
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.settings import TrainingSettings

T = TypeVar("T")
Clock = Callable[[], float]

CHAT_TIMEOUT_S = 10.0
"""A chat waits no longer than this for a disk that hangs; the reply then goes out unrecorded, and says so."""


class Face:
    def __init__(self, writer: Writer, reader: Reader, training: TrainingSettings, masks: Masks, clock: Clock) -> None:
        self._writer, self._reader, self._training, self._masks, self._clock = writer, reader, training, masks, clock

    async def _chat(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._writer.write(work, timeout_s=CHAT_TIMEOUT_S)
