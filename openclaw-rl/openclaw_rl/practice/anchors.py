"""Built-in prompts of anchors, for a user who has too few uncorrected turns of his own.

Practised alone, a wish leaks into other kinds of prompts. Anchors are new replies to prompts that nobody corrected, and
the base without a hint is their teacher. The user's own turns serve best. These stand in until there are enough: short,
of many kinds, about nothing of anybody. No wish is ever made of them.
"""

BUILT_IN: tuple[str, ...] = (
    "Write a story about an old clock.",
    "Explain what a magnet is to a child.",
    "Write an email to my boss about a parking space.",
    "What is the capital of Spain?",
    "Describe a good breakfast.",
    "Write a poem about autumn.",
    "Tell me about elephants.",
    "List three things to pack for a day at the beach.",
    "What is 17 plus 25?",
    "Summarise in your own words: The museum closes early on Mondays because a school orchestra rehearses in its hall.",
    "Write a Python function that reverses a string.",
    "Translate into French: the train leaves at noon.",
    "Write a story about the sea.",
    "Explain what a river is to a child.",
    "Write an email to my landlord about the heating.",
    "What is the capital of Kenya?",
    "Which is heavier, a kilogram of feathers or a kilogram of iron?",
    "Compare a bicycle and a car.",
    "Write a dialogue between a cat and a dog.",
    "What happened in 1969?",
)
