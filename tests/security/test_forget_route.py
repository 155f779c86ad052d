"""`/v1/admin/forget` on the real server: the text leaves the files while the server runs, and secrets never entered
them.
"""

import uuid

SECRET = "sk-proj-Zz12Yy34Xx56Ww78Vv90Uu12"


def words_of(doors) -> bytes:
    return b"".join(file.read_bytes() for file in doors.server.data_dir.rglob("*") if file.is_file())


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
