"""The parts of the proxy's benchmark: its aims, its relay, its stub in both dialects."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn

from benchmarks.proxy import load, relay
from benchmarks.proxy.load import Target
from benchmarks.proxy.stub import Stub
from benchmarks.proxy_overhead import AIMS, CPU, Rows, added, table


@pytest.fixture
async def stub() -> AsyncIterator[int]:
    """The port of a running stub."""
    server = uvicorn.Server(uvicorn.Config(Stub(), port=0, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield port
    server.should_exit = True
    await serving


async def test_both_dialects_of_the_stub_have_as_many_tokens(stub: int) -> None:
    native = await load.ask(Target("engine", stub, 0, "/generate"), load.generate(3), "key")
    chat = await load.ask(Target("engine, OpenAI", stub, 0), load.new_chat(3), "key")
    assert (native.pieces, chat.pieces) == (3, 3)
    assert chat.text.strip()


async def test_the_relay_passes_the_bytes_on(stub: int, tmp_path: Path) -> None:
    where = tmp_path / "relay.json"
    serving = asyncio.create_task(relay.serve(where, stub))
    while not where.is_file():
        await asyncio.sleep(0.01)
    target = Target("relay", json.loads(where.read_text())["port"], 0, "/generate")
    assert (await load.ask(target, load.generate(3), "key")).pieces == 3
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_a_refusal_is_an_error_with_the_name_of_the_program(stub: int) -> None:
    with pytest.raises(RuntimeError, match=r"engine: HTTP/1\.1 404"):
        await load.ask(Target("engine", stub, 0, "/nowhere"), load.generate(3), "key")


def test_each_figure_is_printed_beside_its_aim() -> None:
    rows: Rows = {
        added(1, "p50"): {"relay": [0.1, 0.3, 0.2], "ours": [1.0, 2.0, 1.4], "sglang-router": [0.7, 0.7, 0.7]},
        CPU: {"ours": [30.0], "sglang-router": [20.0]},
    }
    said: list[str] = []
    table(rows, said.append)
    text = "\n".join(said)
    assert "ours                1.40  (1.00 - 2.00)" in text
    assert f"met     {added(1, 'p50')}: 1.40 [<= 1.5]" in text
    assert f"met     {added(1, 'p50')}, times sglang-router's: 2.00 [<= 3]" in text
    assert f"NOT MET {CPU}, times sglang-router's: 1.50 [<= 1.3]" in text
    assert len([line for line in said if "[" in line]) == 3, "an aim without a figure is not printed"
    assert len(AIMS) > 3
