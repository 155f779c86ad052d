"""The fake Telegram, called as a client calls the Bot API."""

from starlette.testclient import TestClient

from e2e.fake_telegram import USER, FakeTelegram


def test_a_user_writes_reads_and_reacts() -> None:
    telegram = FakeTelegram()
    client = TestClient(telegram.app())

    def call(method: str, **body: object) -> object:
        answer = client.post(f"/bot42:FAKE/{method}", json=body).json()
        assert answer["ok"]
        return answer["result"]

    assert call("getMe")["is_bot"]
    telegram.write("hello")
    (update,) = call("getUpdates", offset=0, timeout=1)
    assert (update["message"]["text"], update["message"]["from"]) == ("hello", USER)
    sent = call("sendMessage", chat_id=USER["id"], text="hi")["message_id"]
    call("editMessageText", chat_id=USER["id"], message_id=sent, text="hi there")
    assert telegram.said == {sent: "hi there"}
    telegram.react(sent, "👍")
    (reaction,) = call("getUpdates", offset=update["update_id"] + 1, timeout=1)
    assert reaction["message_reaction"]["message_id"] == sent
    assert reaction["message_reaction"]["new_reaction"] == [{"type": "emoji", "emoji": "👍"}]
    assert call("getUpdates", offset=reaction["update_id"] + 1) == []
    assert call("setMyCommands", commands=[]) is True


def test_a_form_is_a_body_too() -> None:
    telegram = FakeTelegram()
    client = TestClient(telegram.app())
    client.post("/bot42:FAKE/sendMessage", data={"chat_id": "777", "text": "as a form"})
    assert list(telegram.said.values()) == ["as a form"]
