"""Moving bytes between ranks: one contract, two implementations."""

from .launch import end_together, open_survivors, open_transport
from .single import SingleTransport
from .survivors import Dismissal, Member, Survivors
from .transport import (
    HEADER_BYTES,
    Bytes,
    Mailbox,
    Messages,
    SharedMemoryError,
    Transport,
    WaitGivenUpError,
)
from .ulfm import JobOutcome

__all__ = [
    "HEADER_BYTES",
    "Bytes",
    "Dismissal",
    "JobOutcome",
    "Mailbox",
    "Member",
    "Messages",
    "SharedMemoryError",
    "SingleTransport",
    "Survivors",
    "Transport",
    "WaitGivenUpError",
    "end_together",
    "open_survivors",
    "open_transport",
]
