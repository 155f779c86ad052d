"""`/v1/admin/forget` on the real server: the text leaves the files while the server runs, and secrets never entered
them.
"""

import uuid

from files import contents

SECRET = "sk-proj-Zz12Yy34Xx56Ww78Vv90Uu12"


def words_of(doors) -> bytes:
    return b"".join(contents(doors.server.data_dir).values())


def test_a_forgotten_session_leaves_no_byte(keyed):
    session, word = f"s-{uuid.uuid4().hex}", f"quokka{uuid.uuid4().hex[:8]}"
    keyed.chat("ann", messages=[{"role": "user", "content": word}], headers={"X-Session-Id": session})
    assert word.encode() in words_of(keyed)
    answer = keyed.ask("POST", "/v1/admin/forget", "admin", json={"session_id": session, "rebuild": True}).json()
    assert (answer["turns"], answer["trained_in"], answer["rebuilt"]) == (1, [], None)
    assert answer["is_scrubbed"]
    left = words_of(keyed)
    assert word.encode() not in left
    assert session.encode() not in left
    again = keyed.ask("POST", "/v1/admin/forget", "admin", json={"session_id": session})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "not_forgotten")


def test_a_key_that_groups_chats_names_none_to_forget(keyed):
    """Clients give one `prompt_cache_key` to all their chats; `forget my-app` must not take everybody's."""
    app, words = f"my-app-{uuid.uuid4().hex}", [f"quokka{uuid.uuid4().hex[:8]}" for _ in range(3)]
    users = ("ann", "ann", "bob")
    chats = [
        keyed.chat(user, messages=[{"role": "user", "content": word}], prompt_cache_key=app).json()["id"]
        for user, word in zip(users, words, strict=True)
    ]
    for asked in ({"session_id": app}, {"session_id": app, "user": "ann"}, {"turn_id": app}):
        refused = keyed.ask("POST", "/v1/admin/forget", "admin", json=asked)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_forgotten")
    assert all(word.encode() in words_of(keyed) for word in words)
    answer = keyed.ask("POST", "/v1/admin/forget", "admin", json={"turn_id": chats[0]}).json()
    assert (answer["turns"], answer["session_id"]) == (1, None)
    left = words_of(keyed)
    assert [word.encode() in left for word in words] == [False, True, True]


def test_a_session_of_background_requests_alone_is_forgotten(keyed):
    session = f"s-{uuid.uuid4().hex}"
    headers = {"X-Session-Id": session, "X-Turn-Type": "side"}
    assert keyed.chat("ann", headers=headers).status_code == 200
    assert session.encode() in words_of(keyed)
    answer = keyed.ask("POST", "/v1/admin/forget", "admin", json={"session_id": session, "rebuild": True}).json()
    assert (answer["turns"], answer["rebuilt"], answer["not_rebuilt"]) == (0, None, None)
    assert session.encode() not in words_of(keyed)


def test_a_secret_is_served_and_not_written(keyed):
    asked = [{"role": "user", "content": f"my key is {SECRET}, remember it"}]
    reply = keyed.chat("ann", messages=asked)
    assert reply.status_code == 200
    said = keyed.stubs._vocabulary.text(keyed.stubs.calls[-1].input_ids)
    assert SECRET in said  # the model read it
    record = keyed.ask("GET", f"/v1/turns/{reply.json()['id']}", "admin").json()
    assert (record["state"], record["reason"]) == ("dropped", "redacted")
    assert record["request"]["messages"][0]["content"] == "my key is [redacted:api_key], remember it"
    spoken = [*asked, reply.json()["choices"][0]["message"], {"role": "user", "content": "thanks"}]
    keyed.chat("ann", messages=spoken)
    paired = keyed.ask("GET", f"/v1/turns/{reply.json()['id']}", "admin").json()
    assert paired["next_state"]["messages"][0]["content"] == "thanks"  # told, though never trained on
    assert SECRET.encode() not in words_of(keyed)
