"""Requests, scripted replies and streams as the tests of the chat routes want them."""

from openclaw_rl.proxy.frontend import FrontEnd

HI = {"model": "the-policy", "messages": [{"role": "user", "content": "hello"}]}
TOOLS = [{"type": "function", "function": {"name": "exec", "description": "run", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "exec", "arguments": {"command": "%s"}}\n</tool_call>'


def ids_of(frontend: FrontEnd, text: str, *, end: bool = True) -> tuple[int, ...]:
    """Pieces as a model would write them: one token a character, so that every boundary is crossed."""
    backend = frontend._tokenizer.backend_tokenizer
    ids: list[int] = []
    rest = text
    controls = sorted(frontend._pieces._ids, key=len, reverse=True)
    while rest:
        control = next((c for c in controls if rest.startswith(c)), None)
        piece = control or rest[0]
        ids += backend.encode(piece, add_special_tokens=False).ids
        rest = rest[len(piece) :]
    return (*ids, *(sorted(frontend.end_ids)[:1] if end else ()))


def joined(events: list[dict], field: str = "content") -> str:
    return "".join(e["choices"][0]["delta"].get(field) or "" for e in events if e.get("choices"))


def finishes(events: list[dict]) -> list[str]:
    return [e["choices"][0]["finish_reason"] for e in events if e.get("choices") and e["choices"][0]["finish_reason"]]
