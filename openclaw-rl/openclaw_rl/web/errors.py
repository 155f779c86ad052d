"""OpenAI's error form, as a body and as a server-sent event; and the keep-alive comment of a stream."""

import orjson

KEEP_ALIVE = b": keep-alive\n\n"


def error(message: str, *, status: int, code: str | None, param: str | None = None) -> bytes:
    """Return an error as a body in OpenAI's form."""
    kinds = {401: "authentication_error", 413: "invalid_request_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_event(message: str, *, status: int, code: str | None, param: str | None = None) -> bytes:
    """Return an error as an event of a stream that has begun."""
    # No [DONE] follows it: the client must not take the reply for complete.
    return b"data: " + error(message, status=status, code=code, param=param) + b"\n\n"
