"""Logging: an event name and fields, through structlog. No prompt or reply text above DEBUG, ever; secrets never.

`configure` is called once per process by its composition root.
"""

import contextlib
import io
import logging
import sys
from typing import Literal, TextIO, cast

import structlog


class _StandardError(io.TextIOBase):
    """Whatever standard error is when a line is written: loggers are kept for good, a captured stream is not. A line
    that cannot be written is lost and costs nothing else: on a full disk the log is often the ledger's neighbour, and
    whoever says that the one is full must outlive that the other is."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure(level: str = "info", fmt: Literal["console", "json"] = "console", *, process: str = "server") -> None:
    """Send structlog events, and what libraries log at WARNING or above, to standard error."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=False),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if fmt == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _StandardError())),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    logging.basicConfig(
        level=max(number, logging.WARNING), stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
