"""Moving bytes between ranks: one contract, two implementations."""

from .base import HEADER_BYTES, Mailbox, Messages, Transport, WaitGivenUpError
from .launch import end_together, open_survivors, open_transport
from .single import SingleTransport
from .survivors import End, Member, Survivors
from .verdict import Verdict

__all__ = [
    "HEADER_BYTES",
    "End",
    "Mailbox",
    "Member",
    "Messages",
    "SingleTransport",
    "Survivors",
    "Transport",
    "Verdict",
    "WaitGivenUpError",
    "end_together",
    "open_survivors",
    "open_transport",
]
