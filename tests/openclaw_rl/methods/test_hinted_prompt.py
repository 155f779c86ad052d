"""The prompts of a teacher: the hint in the last request, and a neutral request in its place."""

from openclaw_rl.messages import ContentPart, Message
from openclaw_rl.methods.hinted_prompt import asked_instead, hinted
from openclaw_rl.types.pictures import Picture, pictures_in

CHAT = (
    Message(role="user", content="How do I boil an egg?"),
    Message(role="assistant", content="In water."),
    Message(role="user", content=[ContentPart(type="text", text="And a potato?")]),
    Message(role="tool", content="timer set", tool_call_id="1"),
)


def test_other_words_stand_in_the_place_of_the_last_request_alone() -> None:
    changed = asked_instead(CHAT, "Tell me about it.")
    assert changed is not None
    assert changed[2] == Message(role="user", content="Tell me about it.")
    assert (*changed[:2], changed[3]) == (*CHAT[:2], CHAT[3])
    told = hinted(changed, "Thank you.")
    assert told is not None
    assert told[2].text() == "Tell me about it.\n\n(Keep in mind: Thank you.)"


def test_other_words_keep_the_pictures_of_the_request() -> None:
    one, two = Picture("a1" * 32, 32, 24), Picture("b2" * 32, 40, 48)
    said = [ContentPart(type="text", text="Compare "), one.part(), ContentPart(type="text", text=" with "), two.part()]
    chat = (*CHAT[:2], Message(role="user", content=said))
    changed = asked_instead(chat, "Tell me about it.")
    assert changed is not None
    assert pictures_in(changed) == pictures_in(chat) == (one, two)
    assert changed[2].text() == "Tell me about it."


def test_a_chat_without_a_request_has_neither() -> None:
    assert asked_instead(CHAT[1:2], "Tell me about it.") is None
    assert hinted(CHAT[1:2], "Shorter.") is None
