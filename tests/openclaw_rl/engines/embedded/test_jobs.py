from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from openclaw_rl.engines.embedded.jobs import TokenStops, load_decode


def bytes_decode(ids):
    """One token a byte: characters cut into several tokens decode to the replacement character until complete."""
    return bytes(ids).decode("utf-8", errors="replace")


def first_match(stops: list[str], ids: list[int]) -> tuple[int, str] | None:
    """Tokens after which a stop string was found, and which."""
    matcher = TokenStops(stops, bytes_decode)
    for count in range(1, len(ids) + 1):
        matched = matcher.match(ids[:count])
        if matched is not None:
            return count, matched
    return None


def test_a_stop_string_may_span_tokens():
    assert first_match(["\n\nUser:"], list(b"ok\n\nUser: no")) == (9, "\n\nUser:")


def test_no_match_is_none():
    assert first_match(["xyz"], list(b"xy xz yz")) is None


@given(st.text(max_size=40), st.text(min_size=1, max_size=4))
def test_found_exactly_when_the_text_first_holds_it(text, stop):
    ids = list(text.encode())
    found = first_match([stop], ids)
    if stop in text:
        end = text.index(stop) + len(stop)
        assert found == (len(text[:end].encode()), stop)
    elif "\ufffd" not in text + stop:
        assert found is None


def test_emoji_in_pieces_neither_match_early_nor_hide_what_follows():
    assert first_match(["👍!"], list("nice 👍!".encode())) == (len("nice 👍!".encode()), "👍!")


def test_a_folder_without_tokenizer_has_no_decode(tmp_path):
    assert load_decode(tmp_path) is None


def test_special_tokens_are_left_out(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_decode(tmp_path)([0, 1, 2]) == "ab"
