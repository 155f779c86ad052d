"""Requests that nobody expects: bodies of every operation by its schema, chats of any content, bytes, queries, depths.

`hypothesis` and `schemathesis` draw them; equal seeds draw equal requests. `faults` says what is wrong with an answer.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import schemathesis
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode

HI = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_PATH = "/v1/chat/completions"
_CHAT_ROUTES = ("completions", "responses", "messages", "count_tokens", "feedback", "models", "outcomes")
JSON_HEADERS = {"Content-Type": "application/json"}

NUMBERS = st.sampled_from([0, 1, -1, 2, 20, 2**31, 2**53, 2**63, 2**64, 10**30, -(2**63) - 1, 0.5, 1e308, -0.0, 1e-300])
TEXTS = st.sampled_from(
    ["", "a", "\0", "\n", "<|im_end|>", "</think>", "𝔘\U0001f600", "\u202e", "x" * 3000, "{{ 1/0 }}", "%s%n"]
) | st.text(max_size=10)
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": TEXTS}, optional={"arguments": TEXTS | st.just('{"a": 1}') | ANY})},
    optional={"id": ANY, "type": ANY, "index": ANY},
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]),
        "content": TEXTS | st.just([{"type": "text", "text": "a"}]) | ANY,
    },
    optional={
        "tool_calls": st.lists(CALL, max_size=2) | st.none(),
        "tool_call_id": TEXTS,
        "name": TEXTS,
        "reasoning_content": TEXTS,
        "extra": ANY,
    },
)
_NUMBERED = (
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "top_logprobs",
    "frequency_penalty",
    "repetition_penalty",
    "n",
)
_SWITCHES = ("stream", "logprobs", "ignore_eos", "session_done", "enable_thinking")
_NAMES = ("session_id", "prompt_cache_key", "model", "task", "episode", "turn_type", "user")
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=3)},
    optional={
        **{name: NUMBERS for name in _NUMBERED},
        **{name: st.booleans() for name in _SWITCHES},
        **{name: TEXTS | NUMBERS for name in _NAMES},
        "step": NUMBERS,
        "stop": TEXTS | st.lists(TEXTS, max_size=3),
        "tools": st.lists(
            st.fixed_dictionaries(
                {"function": st.fixed_dictionaries({"name": TEXTS}, optional={"parameters": ANY, "description": ANY})},
                optional={"type": ANY},
            ),
            max_size=2,
        ),
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | ANY,
        "response_format": ANY | st.just({"type": "json_schema"}),
        "chat_template_kwargs": st.dictionaries(TEXTS | st.just("enable_thinking"), ANY, max_size=2),
        "logit_bias": st.dictionaries(st.sampled_from(["1", "-1", "a", "9999999999"]), NUMBERS, max_size=2),
        "reasoning_effort": ANY,
        "stream_options": st.none() | st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
        "metadata": ANY,
    },
)
RATING = st.fixed_dictionaries(
    {}, optional={"value": st.booleans() | NUMBERS, "comment": TEXTS, "demonstration": TEXTS, "feedback_id": TEXTS}
)
QUERY = st.fixed_dictionaries({}, optional={name: TEXTS | NUMBERS for name in ("limit", "state", "session_id", "user")})
_WRITTEN = (CHAT_PATH, "/v1/feedback", "/v1/admin/pin", "/v1/admin/forget", "/v1/trainer/commit", "/v1/trainer/failed")
_BYTES = st.binary(max_size=200) | st.builds(
    lambda body, at, junk: body[: at % (len(body) + 1)] + junk,
    CHAT.map(lambda body: json.dumps(body).encode()),
    st.integers(0, 4000),
    st.sampled_from([b"", b"\xff", b"\\ud800", b'"', b"}", b"NaN", b"\0"]),
)
_CHAT_FIELDS = (
    "messages",
    "tools",
    "chat_template_kwargs",
    "response_format",
    "tool_choice",
    "metadata",
    "logit_bias",
    "stream_options",
    "reasoning_effort",
    "stop",
    "session_id",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, before it has an address and a key."""

    operation: str
    """Method and path of the document."""
    method: str
    path: str
    content: bytes | None = None
    query: Mapping[str, Any] = field(default_factory=dict)
    case: Any = None
    """Schemathesis's own request, in place of the rest."""


def key_of(path: str) -> str:
    """Return whose key opens a path: `chat`, `admin` or `trainer`."""
    if "/trainer/" in path:
        return "trainer"
    if "/admin/" in path:
        return "admin"
    is_chats = path.endswith(_CHAT_ROUTES) or any(part in path for part in ("/wishes", "/episodes", "/v1/policy"))
    return "chat" if is_chats else "admin"


def without_keys(document: Any) -> Any:
    """Return the document without its keys: most wrong requests would otherwise be requests without a key."""
    document["components"].pop("securitySchemes", None)
    document.pop("security", None)
    for methods in document["paths"].values():
        for operation in methods.values():
            operation.pop("security", None)
    return document


def by_schema(document: Any, mode: GenerationMode) -> Iterator[tuple[str, SearchStrategy[Asked]]]:
    """Yield each operation of the document with its right requests, or with its wrong ones."""
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation: Any = found
        operation = operation.ok()  # raises for a part of the document that is none
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
            continue  # it takes nothing that could be wrong
        name = f"{operation.method.upper()} {operation.path}"
        yield name, operation.as_strategy(generation_mode=mode).map(partial(_of_case, name))


def _of_case(name: str, case: Any) -> Asked:
    """Return the request; one that would make the server wait, as it should, asks for less."""
    body = case.body if isinstance(case.body, dict) else {}
    if case.path == "/v1/trainer/lease" and isinstance(body.get("wait_s", 30), int | float):
        body["wait_s"] = 0
    version = body.get("weight_version")
    if case.path == "/v1/trainer/push/begin" and isinstance(version, int) and 0 <= version < 1000:
        body["weight_version"] = version + 1000  # a push of the version that serves holds every chat until its end
    return Asked(name, case.method, case.path, case=case)


def chats() -> SearchStrategy[Asked]:
    """Return chats of the right form and any content. Half of them have two fields at most, so that some are served."""
    few = st.builds(_with_few_fields, CHAT, st.integers(0, 2))
    return (CHAT | few).map(lambda body: _post(CHAT_PATH, json.dumps(body).encode()))


def _with_few_fields(body: dict[str, Any], most: int) -> dict[str, Any]:
    return dict(
        [("messages", body["messages"]), *list(body.items())[-most:]] if most else [("messages", body["messages"])]
    )


def variants(asked: Asked) -> Iterator[tuple[str, Asked]]:
    """Yield a chat again: with and without a stream, with its fields as a list, and cut in the middle."""
    # Drawing a body costs more than serving it.
    if asked.path != CHAT_PATH:
        return
    try:
        body = asked.case.body if asked.case is not None else json.loads(asked.content or b"null")
        plain = json.dumps(body).encode()
    except (TypeError, ValueError, RecursionError):
        return
    if not isinstance(body, dict):
        return
    yield "streamed or not", _post(CHAT_PATH, json.dumps({**body, "stream": body.get("stream") is not True}).encode())
    yield "as lists", _post(CHAT_PATH, json.dumps({name: [value] for name, value in body.items()}).encode())
    yield "cut", _post(CHAT_PATH, plain[: len(plain) // 2])


def bytes_of_any_kind() -> SearchStrategy[Asked]:
    """Return bodies that are no JSON, or JSON that is cut or spoilt somewhere."""
    return st.builds(_post, st.sampled_from(_WRITTEN), _BYTES)


def queries() -> SearchStrategy[Asked]:
    """Return queries of any content."""
    return QUERY.map(lambda query: Asked("GET /v1/turns", "GET", "/v1/turns", query=query))


def deep_bodies() -> SearchStrategy[Asked]:
    """Return chats with a field that is nested too deeply for one part of the server or another."""
    return st.builds(_nested, st.sampled_from(_CHAT_FIELDS), st.integers(50, 3000), st.booleans(), st.booleans())


def _nested(name: str, depth: int, is_list: bool, is_inside: bool) -> Asked:
    opens, closes = (b"[", b"]") if is_list else (b'{"a":', b"}")
    deep = opens * depth + b"1" + closes * depth
    if name == "messages":
        deep = b'[{"role":"user","content":"a","extra":' + deep + b"}]" if is_inside else deep
        return _post(CHAT_PATH, b'{"messages":' + deep + b"}")
    if name == "tools":
        deep = b'[{"type":"function","function":{"name":"f","parameters":' + deep + b"}}]"
    elif name == "response_format" and is_inside:
        deep = b'{"type":"json_schema","json_schema":{"schema":' + deep + b"}}"
    elif name == "chat_template_kwargs":
        deep = b'{"enable_thinking":' + deep + b"}"
    return _post(CHAT_PATH, json.dumps(HI).encode()[:-1] + b',"' + name.encode() + b'":' + deep + b"}")


def _post(path: str, content: bytes) -> Asked:
    return Asked(f"POST {path}", "POST", path, content)


@dataclass(frozen=True, slots=True)
class Answer:
    asked: Asked
    status: int
    headers: Mapping[str, str]
    """In lower case."""
    text: str
    seconds: float


BODY_FAULTS = (400, 422)
_WHOLE = frozenset({"invalid_json", "engine_refused"})
"""Codes of the faults that lie in no field: of the body as a whole, and of an engine that names none."""


def faults(answer: Answer) -> list[str]:
    """Return the faults of an answer: a 5xx but a documented 503, an error of another form or without its field."""
    if answer.status < 400:
        return []
    if answer.status >= 500 and not (answer.status == 503 and "retry-after" in answer.headers):
        return [f"{answer.status} is no answer"]
    if "/messages" in answer.asked.operation:
        return _faults_of_messages(answer.text)
    try:
        error = json.loads(answer.text)["error"]
        kinds = [type(error[name]) for name in ("message", "type", "code", "param")]
    except (ValueError, KeyError, TypeError):
        return ["an error in another form than OpenAI's"]
    found = []
    if kinds[:2] != [str, str] or not all(kind in (str, type(None)) for kind in kinds[2:]):
        found.append("an error with fields of other types than OpenAI's")
    if answer.status in BODY_FAULTS and error["code"] not in _WHOLE and not error["param"]:
        found.append("a fault that names no field")
    return found


def _faults_of_messages(text: str) -> list[str]:
    """Return the faults of an error of Anthropic's API: its form has no field for the name of a field."""
    try:
        body = json.loads(text)
        told = [body["type"], body["error"]["type"], body["error"]["message"], body["request_id"]]
    except (ValueError, KeyError, TypeError):
        return ["an error in another form than Anthropic's"]
    if told[0] != "error" or not all(isinstance(part, str) and part for part in told):
        return ["an error with fields of other types than Anthropic's"]
    return []
