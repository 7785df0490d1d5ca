"""The errors every part speaks, and nothing else does.

    HeadraceError                code              reason (default)
    ├── InvalidRequest           INVALID_ARGUMENT  INVALID_FIELD        names the field
    ├── Unauthenticated          UNAUTHENTICATED   BAD_CREDENTIAL
    ├── Forbidden                PERMISSION_DENIED NOT_PERMITTED
    ├── NotFound                 NOT_FOUND         NOT_FOUND
    ├── Exhausted                RESOURCE_EXHAUSTED OVERLOADED          says when to retry
    ├── Unavailable              UNAVAILABLE       NO_REPLICA           says when to retry
    ├── DeadlinePassed           DEADLINE_EXCEEDED DEADLINE_EXCEEDED
    ├── StaleEpoch               FAILED_PRECONDITION STALE_EPOCH
    ├── StreamBroken             ABORTED           STREAM_BROKEN        says how many tokens were emitted
    │   └── ReaderStalled        ABORTED           READER_STALLED       the client itself took nothing
    └── InternalError            INTERNAL          INTERNAL
    StartError                   (no code: a process cannot start; one line for the operator)

`headrace.rpc.status` is the only place that turns these into gRPC statuses and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Code(Enum):
    """Status codes, by gRPC's names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    NOT_FOUND = "NOT_FOUND"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    INTERNAL = "INTERNAL"


class HeadraceError(Exception):
    """A failure with a code, an UPPER_SNAKE reason, and facts a client can act on.

    `field` is a path such as ``sampling.top_p`` (invalid requests only); `retry_after_s` is seconds until
    a retry makes sense; `metadata` holds the variable parts, so that `message` may change freely.
    """

    code: Code = Code.INTERNAL
    default_reason: str = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata: dict[str, str] = dict(metadata or {})


class InvalidRequest(HeadraceError):
    """The request cannot be served as it stands; `field` says which part and the message how to mend it."""

    code = Code.INVALID_ARGUMENT
    default_reason = "INVALID_FIELD"

    def __init__(self, field: str, why: str, *, reason: str | None = None) -> None:
        super().__init__(f"{field}: {why}", reason=reason, field=field)
        self.why = why


class Unauthenticated(HeadraceError):
    """No credential, or one that is not known."""

    code = Code.UNAUTHENTICATED
    default_reason = "BAD_CREDENTIAL"


class Forbidden(HeadraceError):
    """A known credential without the permission."""

    code = Code.PERMISSION_DENIED
    default_reason = "NOT_PERMITTED"


class NotFound(HeadraceError):
    """The named thing does not exist."""

    code = Code.NOT_FOUND
    default_reason = "NOT_FOUND"


class Exhausted(HeadraceError):
    """A limit or a full queue; retry after `retry_after_s`."""

    code = Code.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"


class Unavailable(HeadraceError):
    """Nobody can serve this now; retry after `retry_after_s`."""

    code = Code.UNAVAILABLE
    default_reason = "NO_REPLICA"


class DeadlinePassed(HeadraceError):
    """The caller's deadline passed, or too little of it is left for useful work."""

    code = Code.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class StaleEpoch(HeadraceError):
    """The caller speaks to an earlier life of this process; refresh and try again."""

    code = Code.FAILED_PRECONDITION
    default_reason = "STALE_EPOCH"


class StreamBroken(HeadraceError):
    """An answer broke off after `tokens_emitted` tokens and could not be continued elsewhere."""

    code = Code.ABORTED
    default_reason = "STREAM_BROKEN"

    def __init__(self, message: str, *, tokens_emitted: int) -> None:
        super().__init__(message, metadata={"tokens_emitted": str(tokens_emitted)})


class ReaderStalled(StreamBroken):
    """The client of a stream took nothing for so long that it was cut off."""

    default_reason = "READER_STALLED"

    def __init__(self, message: str, *, metadata: Mapping[str, str] | None = None) -> None:
        HeadraceError.__init__(self, message, metadata=metadata)


class InternalError(HeadraceError):
    """A fault of ours."""


class StartError(Exception):
    """A process cannot start for a reason the operator can mend; the text is one line that says what and how."""
