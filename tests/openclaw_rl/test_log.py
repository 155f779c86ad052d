"""Where log lines go."""

import contextlib
import io

import pytest
import structlog

from openclaw_rl.log import configure as configure_log


@pytest.mark.keeps_loggers
def test_a_logger_outlives_the_stream_it_was_first_used_on():
    with contextlib.redirect_stderr(io.StringIO()) as first:
        configure_log("info")
        logger = structlog.get_logger()
        logger.info("one")
    first.close()
    with contextlib.redirect_stderr(io.StringIO()) as second:
        logger.info("two", n=2)
    assert "two" in second.getvalue()


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.keeps_loggers
def test_a_line_that_cannot_be_written_costs_nothing_but_itself():
    with contextlib.redirect_stderr(FullDisk()):
        configure_log("info")
        logger = structlog.get_logger()
        logger.error("lost")
    with contextlib.redirect_stderr(io.StringIO()) as later:
        logger.error("written")
    assert "written" in later.getvalue()
    assert "lost" not in later.getvalue()


@pytest.mark.keeps_loggers
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_a_text_that_the_stream_cannot_hold_is_written_in_other_letters(encoding: str):
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, errors="strict", write_through=True)
    with contextlib.redirect_stderr(stream):
        configure_log("info")
        structlog.get_logger().error("said", text="half \ud800 and 日本")
    assert b"half" in written.getvalue()
    assert b"said" in written.getvalue()
