"""Moving bytes between ranks: one contract, two implementations."""

from .base import HEADER_BYTES, Mailbox, Transport, WaitGivenUpError
from .launch import open_survivors, open_transport
from .single import SingleTransport
from .survivors import Member, Survivors

__all__ = [
    "HEADER_BYTES",
    "Mailbox",
    "Member",
    "SingleTransport",
    "Survivors",
    "Transport",
    "WaitGivenUpError",
    "open_survivors",
    "open_transport",
]
