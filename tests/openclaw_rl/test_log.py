"""Where log lines go."""

import contextlib
import io

import pytest
import structlog

from openclaw_rl import log


@pytest.mark.keeps_loggers
def test_a_logger_outlives_the_stream_it_was_first_used_on():
    with contextlib.redirect_stderr(io.StringIO()) as first:
        log.configure("info")
        logger = structlog.get_logger()
        logger.info("one")
    first.close()
    with contextlib.redirect_stderr(io.StringIO()) as second:
        logger.info("two", n=2)
    assert "two" in second.getvalue()
