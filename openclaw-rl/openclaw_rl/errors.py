"""Exceptions of the project, named by the boundary that failed.

    OpenClawRLError
    ├── SettingsError        a wrong key or value: one line that names it
    ├── RequestError         the caller's request is wrong: a 4xx with OpenAI's `code` and `param`
    ├── EngineError          the engine did not answer, or its answer cannot be used
    │   ├── EngineRefused    it answered 4xx: the request itself is at fault, never retried
    │   └── EngineGone       it did not answer at all: retried, then a 503 with Retry-After
    │       ├── EngineFaulty  it answered 5xx, or what cannot be read: it or the request is at fault
    │       └── EngineLeft   one engine of a pool did not, and others serve
    ├── LedgerError          the ledger refused a change: it is not legal, or names a row that does not exist
    │   ├── LedgerUnavailable  it cannot be read or written now (disk full, locked, closed): may be retried
    │   ├── FeedbackReused   a feedback_id came again with other feedback
    │   ├── EpisodeRefused   an episode cannot be opened, continued or ended so: a 4xx with its own `code`
    │   ├── LedgerLocked     another server holds it
    │   └── LedgerMismatch   it belongs to another model, or to another schema
    ├── JudgeError           the judge gave no verdict (never the same as a verdict of 0)
    ├── TeacherError         the teacher gave no log-probs
    ├── TrainerError         a step failed
    │   └── CommitRefused    the ledger refused the step: the lease is over or its parent is no longer the tip
    ├── ClientError          a chat client on this machine, or its configuration, refused a command
    ├── EnvironmentFault     an agents' environment failed, not the policy: its episode is aborted, never scored
    │   └── SandboxFault     a sandbox cannot start, or ended by itself
    └── AlignmentError       token ids, log-probs and masks do not describe the same tokens

Catch an exception only where the code can act on it; a bug (`KeyError`) propagates to `app.py`.
"""


class OpenClawRLError(Exception):
    """Base of every error this project raises on purpose."""


class SettingsError(OpenClawRLError):
    """A setting has a wrong name or value."""


class RequestError(OpenClawRLError):
    """The caller's request cannot be served as it is."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """retry_after_s: seconds after which the same request may be served."""
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param
        self.retry_after_s = retry_after_s


class EngineError(OpenClawRLError):
    """The engine failed."""


class EngineRefused(EngineError):
    """The engine answered 4xx; `status`, `message` and `retry_after` (a header, for a 429) are its own."""

    def __init__(self, message: str, *, status: int, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.retry_after = message, status, retry_after


class PicturesRefused(EngineRefused):
    """No engine was asked: the prompt shows pictures that the engine cannot get, or has a place without a picture."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=400)


class EngineGone(EngineError):
    """The engine cannot be reached, or its answer ended in the middle."""


class EngineFaulty(EngineGone):
    """The engine answered 5xx, or what cannot be read. The engine or the request is at fault."""


class EngineLeft(EngineGone):
    """One engine of a pool broke off, and others serve."""


class LedgerError(OpenClawRLError):
    """The ledger cannot be read or written, or a change is not legal."""


class LedgerUnavailable(LedgerError):
    """The ledger cannot be read or written now; it recovers by itself."""


class FeedbackReused(LedgerError):
    """A `feedback_id` that belongs to other feedback was used again."""


class EpisodeRefused(LedgerError):
    """An episode cannot be opened, continued or ended so; `retry_after_s` where a later attempt may work."""

    def __init__(
        self, message: str, *, status: int = 409, code: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param
        self.retry_after_s = retry_after_s


class LedgerLocked(LedgerError):
    """Another server process holds this ledger."""


class LedgerMismatch(LedgerError):
    """This ledger belongs to another model, tokenizer or schema."""


class JudgeError(OpenClawRLError):
    """The judge gave no verdict."""


class JudgeRefused(JudgeError):
    """The judge refused this prompt; another prompt may be answered."""


class TeacherError(OpenClawRLError):
    """The teacher gave no log-probs."""


class TrainerError(OpenClawRLError):
    """A training step failed."""


class CommitRefused(TrainerError):
    """The ledger refused a step; the trainer discards it and reloads `tip`."""


class ClientError(OpenClawRLError):
    """A chat client, or its configuration, cannot be used as asked."""


class EnvironmentFault(OpenClawRLError):
    """An environment, its task or its checker failed; the policy is not at fault."""


class SandboxFault(EnvironmentFault):
    """A sandbox cannot start, or ended by itself."""


class AlignmentError(OpenClawRLError):
    """Ids, log-probs and masks differ in length."""
