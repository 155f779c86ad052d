"""Our own model names, aliases, and versions that are no longer served."""

import asyncio

import pytest
from structlog.testing import capture_logs
from waiting import until

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.errors import RequestError
from openclaw_rl.proxy.model_names import ModelNames
from openclaw_rl.settings import ServerSettings

HI = {"messages": [{"role": "user", "content": "hello"}]}


def names(unknown="serve", warned=None, served="Smol-v2"):
    return ModelNames(served, unknown, lambda: 7, (warned if warned is not None else []).append)


@pytest.mark.parametrize("name", [None, "", "policy", "Smol-v2"])
@pytest.mark.parametrize("unknown", ["serve", "refuse"])
def test_our_names_stand_for_whatever_is_current(name, unknown) -> None:
    warned: list[str] = []
    assert names(unknown, warned).wanted_version(name) is None
    assert warned == []


@pytest.mark.parametrize("name", ["policy@v7", "policy@7", "policy-v7", "Smol-v2@v7", "Smol-v2-v7"])
@pytest.mark.parametrize("unknown", ["serve", "refuse"])
def test_the_current_version_may_be_named(name, unknown) -> None:
    assert names(unknown).wanted_version(name) == 7


@pytest.mark.parametrize(
    "name", ["policy@v999", "policy-v999", "policy@v6", "policy@latest", "policy@", "Smol-v2@v8", "policy@v7\n"]
)
@pytest.mark.parametrize("unknown", ["serve", "refuse"])
def test_a_version_of_ours_that_is_not_served_is_not_found(name, unknown) -> None:
    with pytest.raises(RequestError, match=r"Served here: Smol-v2, policy, policy@v7") as caught:
        names(unknown).wanted_version(name)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("name", ["gpt-5", "policy-vision", "policy2", "my/policy@v3", "POLICY", "Smol-v3"])
def test_any_other_name_is_an_alias_or_refused(name) -> None:
    warned: list[str] = []
    assert names("serve", warned).wanted_version(name) is None
    assert warned == [name]
    with pytest.raises(RequestError) as caught:
        names("refuse", warned).wanted_version(name)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert warned == [name]


async def test_an_alias_is_warned_of_once_and_a_version_that_is_not_there_is_a_404(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        with capture_logs() as logs:
            for _ in range(3):
                assert (await proxy.post({**HI, "model": "gpt-5"})).json()["model"] == "gpt-5"
        assert [entry["named"] for entry in logs if entry["event"] == "other_model_named"] == ["gpt-5"]
        assert (await proxy.post({**HI, "model": "policy@v0"})).headers["x-weight-version"] == "0"
        gone = await proxy.post({**HI, "model": "policy@v999", "stream": True})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert len(proxy.fake.calls) == len(proxy.book.requests) == 4


async def test_foreign_names_can_be_refused(qwen, proxy_over) -> None:
    async with proxy_over(qwen, server=ServerSettings(unknown_model="refuse")) as proxy:
        refused = await proxy.post({**HI, "model": "gpt-5"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "the-policy" in refused.json()["error"]["message"]
        assert (await proxy.post({**HI, "model": "the-policy"})).status_code == 200
        assert (await proxy.post(HI)).status_code == 200


async def test_a_version_that_goes_while_the_request_waits_does_not_answer_in_its_name(qwen, proxy_over) -> None:
    serving = VersionAdmission(hold_s=120)
    serving.switch(0, None)
    serving.hold()
    async with proxy_over(qwen, serving=serving, keep_gate=True) as proxy:
        waiting = asyncio.create_task(proxy.post({**HI, "model": "policy@v0"}))
        await until(lambda: proxy.book.requests)
        serving.switch(1, "policy-v1")
        serving.release_hold()
        reply = await waiting
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
        assert (proxy.fake.calls, proxy.book.turns) == ([], [])


@pytest.mark.parametrize("name", ["the-policy", "policy", "policy@v0"])
async def test_a_model_of_ours_can_be_looked_up_by_its_name(qwen, proxy_over, name) -> None:
    async with proxy_over(qwen) as proxy:
        (listed,) = (await proxy.client.get("/v1/models")).json()["data"]
        reply = await proxy.client.get(f"/v1/models/{name}")
        assert (reply.status_code, reply.json()) == (200, listed | {"id": name})


@pytest.mark.parametrize("name", ["gpt-5", "my/policy", "policy@v9"])
async def test_no_other_model_is_found(qwen, proxy_over, name) -> None:
    async with proxy_over(qwen) as proxy:
        reply = await proxy.client.get(f"/v1/models/{name}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
