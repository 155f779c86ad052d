"""What is written, for how long, and what is held in memory."""

from pydantic import Field

from openclaw_rl.settings.base import Branch


class RedactionSettings(Branch):
    """What is masked before the ledger writes it. A turn with a mark in its prompt or reply is never trained on."""

    secrets: bool = True
    """API keys, tokens, private keys, passwords: found by their form."""
    pii: bool = False
    """E-mail addresses, phone, card, account and social security numbers too."""


class RetentionSettings(Branch):
    """What the ledger lets go of by itself: turns that are over (trained, dropped). What still waits always stays."""

    max_age_days: float | None = Field(default=None, gt=0)
    """Older ones go; none when unset."""
    max_gb: float | None = Field(default=None, gt=0)
    """The oldest go while the ledger's file holds more than this; no limit when unset."""
    every_s: float = Field(default=3600.0, gt=0)
    """Between two rounds; a round takes at most 20,000 turns."""


class MemorySettings(Branch):
    """What the server keeps so as not to do it again. Less of it costs time and nothing else."""

    texts_mb: float = Field(default=32.0, gt=0)
    """Tokens of texts seen: some ten million characters of English."""
    words: int = Field(default=4000, ge=0)
    """Words that the tokenizer library itself keeps, in each of three threads, and never throws out again: 2 MB of
    English, 20 of Chinese, where a sentence is a word, 32 at most. A text not seen takes a seventh longer than with
    10,000 of them.
    """
    ledger_mb: float = Field(default=32.0, gt=0)
    """Pages of the ledger, its four connections together."""
    clean_texts: int = Field(default=50_000, ge=1)
    """Hashes of texts that hold nothing to redact: 4 MB."""
