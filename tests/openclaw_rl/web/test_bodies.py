"""Names of places in a body, and the field that is nested too deeply."""

import pytest

from openclaw_rl.web.bodies import nested_too_deeply, place_name


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (("messages", 0, "content"), "messages[0].content"),
        (("tools", 2), "tools[2]"),
        (("limit",), "limit"),
        ((), ""),
    ],
)
def test_a_place_has_a_name(place: tuple[str | int, ...], name: str) -> None:
    assert place_name(place) == name


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"model":"a","messages":[[[[1]]]],"tools":[[1]]}', "messages"),
        (b'{"tools":[[1]],"metadata":' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}", "metadata"),
        (b'{"metadata":' + b'{"a":' * 3000, "metadata"),  # cut
        (b'{"stop":"a[[[[[[","tools":[[1]]}', "tools"),  # brackets of a text
        (b'{"a \\" [[[ b":[[1]],"tools":[]}', 'a \\" [[[ b'),  # the key as it was sent
        (b'{"tools" : [ [ 1 ] ] , "stop":"x"}', "tools"),
    ],
)
def test_the_field_with_the_deepest_value_is_named(body: bytes, field: str) -> None:
    refusal = nested_too_deeply(body)
    assert (refusal.status, refusal.param) == (400, field)
    assert field in refusal.message


@pytest.mark.parametrize("body", [b"[" * 3000, b"", b"1", b"[[1]]"])
def test_a_body_without_fields_is_at_fault_as_a_whole(body: bytes) -> None:
    refusal = nested_too_deeply(body)
    assert (refusal.code, refusal.param) == ("invalid_json", None)
