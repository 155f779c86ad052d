"""Scoring passes in the engine's dialect: the request, its blocks of ids, and the checks of the answer.

An answer is checked against the ids that were sent. Another reply's numbers are an AlignmentError, never a term.
"""

import json
import math
from collections.abc import Iterator, Sequence

from openclaw_rl.engines.base import PRIORITY_BACKGROUND
from openclaw_rl.engines.dialect import EngineSampling, GenerateReply, GenerateRequest, TokenLogProb, storable
from openclaw_rl.engines.pictures import PicturePrompt
from openclaw_rl.engines.sglang.launch import TAKES_IDS
from openclaw_rl.errors import AlignmentError, EngineFaulty, EngineRefused
from openclaw_rl.types import Ids, LogProbs

BLOCK_VALUES = 4096
"""Most log-probs of given ids in one answer: some 100 KB of JSON, which is read between two chunks of a chat."""
SAME_PASS = 1e-3
"""Largest difference of two log-probs of one token in one answer."""


def id_blocks(ids: Sequence[Ids]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of blocks of positions, each with at most `BLOCK_VALUES` log-probs, or of one position.

    A block has the log-probs of all its ids at each of its positions.
    """
    begin, wanted = 0, set[int]()
    for at, row in enumerate(ids):
        with_row = wanted.union(row)
        if at > begin and (at + 1 - begin) * len(with_row) > BLOCK_VALUES:
            yield begin, at
            begin, with_row = at, set(row)
        wanted = with_row
    if begin < len(ids):
        yield begin, len(ids)


def scoring_request(
    prompt_ids: Ids,
    response_ids: Ids,
    *,
    lora_path: str | None,
    extra_key: str | None,
    shown: PicturePrompt | None = None,
) -> GenerateRequest:
    """Return the request for the response's log-probs at temperature 1: no new token, behind every chat.

    shown: the prompt as the engine gets it, where it shows pictures. Positions count the expanded prompt.
    """
    return GenerateRequest(
        input_ids=[*(prompt_ids if shown is None else shown.ids), *response_ids],
        image_data=None if shown is None else shown.image_data,
        sampling_params=EngineSampling(max_new_tokens=0, temperature=1.0),
        return_logprob=True,
        logprob_start_len=len(prompt_ids) - 1,
        lora_path=lora_path,
        extra_key=extra_key,
        priority=PRIORITY_BACKGROUND,
    )


def aligned(entries: list[TokenLogProb] | None, response_ids: Ids) -> LogProbs:
    """Return the T log-probs of `response_ids` out of T + 1 entries. The first entry's log-prob is null."""
    found = (entries or [])[1:]
    if not _are_same(response_ids, [token for _, token, _ in found]):
        raise AlignmentError(f"{len(response_ids)} tokens to score, {len(found)} scored, or others")
    values = tuple(storable(log_prob) for log_prob, _, _ in found if log_prob is not None)
    if len(values) != len(response_ids):
        raise AlignmentError(f"{len(response_ids) - len(values)} of {len(response_ids)} log-probs are missing")
    return values


def check_length(reply: GenerateReply, tokens: int) -> None:
    """Raise AlignmentError if the engine counts other tokens of a prompt with pictures: it saw another prompt."""
    if (counted := reply.meta_info.prompt_tokens) != tokens:
        raise AlignmentError(f"the engine reads {counted} tokens where the prompt with its pictures has {tokens}")


def check_takes_ids(server_info: bytes) -> None:
    """Raise EngineRefused if an SGLang of these settings ends when ids are named beside another prompt."""
    try:
        told = json.loads(server_info)
    except ValueError as error:
        raise EngineFaulty(f"/server_info: {error}") from error
    needed = {"prefill_max_requests": 1, "disable_overlap_schedule": True, "enable_mixed_chunk": False}
    if isinstance(told, dict) and any(told.get(name, value) != value for name, value in needed.items()):
        flags = " ".join(TAKES_IDS)
        reason = f"given ids would end this SGLang: start it with {flags}, without --enable-mixed-chunk"
        raise EngineRefused(reason, status=400)


def rows_of(entries: list[list[TokenLogProb] | None] | None, ids: Sequence[Ids]) -> list[LogProbs]:
    """Return the log-probs of `ids` [T, K] out of T + 1 entries that hold them all. The first entry is null."""
    found = (entries or [])[1:]
    if len(found) != len(ids):
        raise AlignmentError(f"{len(ids)} tokens, {len(found)} rows of log-probs of given ids")
    rows = []
    for entry, row in zip(found, ids, strict=True):
        told = {token: -math.inf if log_prob is None else storable(log_prob) for log_prob, token, _ in entry or ()}
        if missing := [token for token in row if token not in told]:
            raise AlignmentError(f"log-probs of {len(missing)} of {len(row)} given ids are missing")
        rows.append(tuple(told[token] for token in row))
    return rows


def is_table_of(rows: Sequence[list[TokenLogProb]], ids: Ids, log_probs: LogProbs) -> bool:
    """Return True if each row gives its token the token's own log-prob, where it holds the token."""
    return not any(
        abs(storable(log_prob) - own) > SAME_PASS  # not so of a NaN, which the caller refuses
        for row, token, own in zip(rows, ids, log_probs, strict=True)
        for log_prob, listed, _ in row
        if listed == token
    )


def _are_same(ids: Ids, found: Sequence[int]) -> bool:
    """Compare the ids. Every occurrence of the highest id may be 0, as SGLang writes the vocabulary's last id."""
    if (scored := tuple(found)) == ids:
        return True
    last = max(ids, default=0)
    return scored == tuple(0 if token == last else token for token in ids)  # a shift by one never looks like that
