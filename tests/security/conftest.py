"""Real servers over a stub engine: `keyed` has chat keys of two users, and `open_server` has no keys.

Both live as long as the module that asks for them. A test may see what an earlier test recorded.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from harness.host import Host, Server
from harness.model import Vocabulary
from harness.stubs import Stubs

ANN, BOB = "sk-ann-5up3r", "sk-bob-5up3r"
HELLO = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class Doors:
    """A running server, with a client for each key."""

    server: Server
    stubs: Stubs
    keys: Mapping[str, str]
    """`ann`, `bob`, `admin`, `trainer`."""
    http: httpx.Client

    def ask(self, method: str, path: str, key: str | None = None, **kwargs: Any) -> httpx.Response:
        """key: the name of a key in `keys`, or a key itself."""
        headers = dict(kwargs.pop("headers", {}))
        if key is not None:
            headers["Authorization"] = f"Bearer {self.keys.get(key, key)}"
        return self.http.request(method, self.server.url + path, headers=headers, **kwargs)

    def chat(self, key: str | None = None, *, messages: Any = None, **body: Any) -> httpx.Response:
        headers = body.pop("headers", {})
        sent = {"messages": messages or HELLO, **body}
        return self.ask("POST", "/v1/chat/completions", key, json=sent, headers=headers)


@pytest.fixture(scope="session")
def stub_engine(model_folder: Path) -> Iterator[tuple[str, Stubs]]:
    """Yield the URL of an engine that replies "Yes." to every prompt, and the requests that it got."""
    stubs = Stubs({"engine": [{"text": "Yes."}]}, Vocabulary.of(model_folder), pace=0.01)
    listener = socket.create_server(("127.0.0.1", 0))
    runner = uvicorn.Server(uvicorn.Config(stubs, log_level="error", lifespan="off", access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(runner.serve(sockets=[listener])))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", stubs
    runner.should_exit = True
    thread.join(10)


@pytest.fixture(scope="session")
def engine_settings(stub_engine: tuple[str, Stubs]) -> dict[str, Any]:
    """Return the settings of a server over the stub engine, without a trainer."""
    return {"engine.kind": "url", "engine.url": stub_engine[0], "trainer.kind": "external"}


@pytest.fixture(scope="session")
def key_settings() -> dict[str, Any]:
    return {
        "server.api_keys": [{"key": ANN, "user": "ann"}, {"key": BOB, "user": "bob"}],
        "server.admin_key": "admin-5up3r",
        "server.trainer_token": "trainer-5up3r",
    }


@pytest.fixture(scope="session")
def doors_of(stub_engine: tuple[str, Stubs]) -> Iterator[Callable[[Server], Doors]]:
    keys = {"ann": ANN, "bob": BOB, "admin": "admin-5up3r", "trainer": "trainer-5up3r"}
    with httpx.Client(timeout=120, trust_env=False) as client:
        yield lambda server: Doors(server, stub_engine[1], keys, client)


@pytest.fixture(scope="module")
def keyed(
    host: Host,
    tmp_path_factory: pytest.TempPathFactory,
    engine_settings: dict[str, Any],
    key_settings: dict[str, Any],
    doors_of: Callable[[Server], Doors],
) -> Iterator[Doors]:
    with host.running(tmp_path_factory.mktemp("keyed"), engine_settings | key_settings, umask=0) as server:
        yield doors_of(server)


@pytest.fixture(scope="module")
def open_server(
    host: Host,
    tmp_path_factory: pytest.TempPathFactory,
    engine_settings: dict[str, Any],
    doors_of: Callable[[Server], Doors],
) -> Iterator[Doors]:
    with host.running(tmp_path_factory.mktemp("open"), engine_settings) as server:
        yield doors_of(server)
