"""`IN (?, ?, …)` in a few wordings.

Each connection keeps the 256 statements that it prepared last, by their text, and one with 500 marks takes 60 kB: with
a wording for each number of values they would fill, over days, 18 MB a connection. So the values are filled up with
the last of them to a power of two, which changes nothing of what is found.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def in_list(values: Sequence[T]) -> tuple[str, list[T]]:
    """The marks between the brackets, and what to bind to them. There is at least one value."""
    size = 1 << (len(values) - 1).bit_length()
    return ",".join("?" * size), [*values, *[values[-1]] * (size - len(values))]
