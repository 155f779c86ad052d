"""Settings of redaction, retention and caches."""

from pydantic import Field

from openclaw_rl.settings.base import Branch


class RedactionSettings(Branch):
    """Texts that are masked before the ledger writes them. A turn with a mark in its prompt or reply never trains."""

    secrets: bool = True
    """API keys, tokens, private keys, passwords: found by their form."""
    pii: bool = False
    """E-mail addresses, phone, card, account and social security numbers too."""
    pictures: bool = False
    """Every picture: a mark is stored in its place, and its file is not. No form tells a secret in a picture."""


class RetentionSettings(Branch):
    """Automatic deletion of finished turns (trained, dropped). A turn that still waits is never deleted."""

    max_age_days: float | None = Field(default=None, gt=0)
    """Age after which the ledger deletes finished turns; it deletes no turn by age when unset."""
    max_gb: float | None = Field(default=None, gt=0)
    """Size of the ledger's file and pictures above which it deletes the oldest finished turns; no limit when unset."""
    every_s: float = Field(default=3600.0, gt=0)
    """Time between two rounds; a round deletes at most 20,000 turns."""


class MemorySettings(Branch):
    """Sizes of the server's caches. A smaller cache costs time only."""

    texts_mb: float = Field(default=32.0, gt=0)
    """Tokens of texts seen: 32 MB hold some ten million characters of English."""
    words: int = Field(default=4000, ge=0)
    """Words that the tokenizer library itself keeps, in each of three threads, and never deletes: 2 MB of English, 20
    of Chinese, where a sentence is a word, 32 at most. A new text takes a seventh longer than with 10,000 words."""
    ledger_mb: float = Field(default=32.0, gt=0)
    """Pages of the ledger, its four connections together."""
    clean_texts: int = Field(default=50_000, ge=1)
    """Hashes of texts with no text to redact: 4 MB."""
