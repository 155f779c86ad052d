"""Replies to prompts with pictures at the gate."""

from openclaw_rl.publishing.reply_scores import Remembered, affordable
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.types.pictures import Picture, PromptIds

ONE, TWO = Picture("a1" * 32, 32, 32), Picture("b2" * 32, 32, 32)


def seeing(length: int, picture: Picture = ONE) -> PromptIds:
    return PromptIds(range(length), (picture,))


async def test_figures_of_another_picture_of_one_size_are_others() -> None:
    remembered = Remembered()
    asked = []

    async def score(number, prompt, ids):
        asked.append(prompt)
        return (-1.0,)

    for prompt in (seeing(5), seeing(5, TWO), tuple(range(5)), seeing(5)):
        await remembered.of(1, prompt, (9,), score)
    assert asked == [seeing(5), seeing(5, TWO), tuple(range(5))]


def test_the_gate_reads_replies_of_both_kinds() -> None:
    texts = [(tuple(range(n)), (1, 2, 3)) for n in (4, 3, 2)]
    pictures = [(seeing(n), (1, 2, 3)) for n in (60, 50)]
    settings = PublisherSettings(gate_replies=4, gate_prompt_tokens=70, gate_tokens=2)
    kept = affordable([*texts, *pictures], settings)
    assert [len(prompt) for prompt, _ in kept] == [2, 50, 3]
    assert all(ids == (1, 2) for _, ids in kept)
    assert kept[1][0] == seeing(50)
    assert [len(prompt) for prompt, _ in affordable(texts, settings)] == [2, 3, 4]
    assert affordable(pictures[:1], settings.model_copy(update={"gate_prompt_tokens": 5})) == [(seeing(60), (1, 2))]
