"""Logging of events with fields, through structlog. No prompt or reply text above DEBUG, and no secret at any level.

`configure` is called once per process by its composition root.
"""

import contextlib
import io
import logging
import sys
from typing import Literal, TextIO, cast

import structlog


class _StandardError(io.TextIOBase):
    """Stream that writes each line to the present `sys.stderr`."""

    # Loggers live as long as the process, a captured `sys.stderr` does not. A line that cannot be written is lost: log
    # and ledger are often on one disk, and a full disk must not end the server that reports it.
    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            try:
                sys.stderr.write(text)
            except UnicodeEncodeError:  # half a character, or one that this stream's encoding has not
                sys.stderr.write(text.encode("ascii", "backslashreplace").decode())
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure(level: str = "info", fmt: Literal["console", "json"] = "console", *, process: str = "server") -> None:
    """Send structlog events, and the libraries' log lines at WARNING or above, to standard error."""
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
