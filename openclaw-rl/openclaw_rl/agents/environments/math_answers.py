"""Equality of a policy's answer with the right one, by math-verify. Runs in a process of `child`.

Only the LaTeX reader of math-verify is used. Its other one hands text to a parser of sympy, which evaluates it.
"""

from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

_AS_LATEX = (LatexExtractionConfig(),)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    right, said = (parse(f"${asked[name]}$", _AS_LATEX) for name in ("right", "said"))
    return {"equal": bool(right and said and verify(right, said))}
