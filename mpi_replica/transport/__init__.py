"""Moving bytes between ranks: one contract, two implementations."""

from .base import HEADER_BYTES, Mailbox, Transport, WaitGivenUpError
from .launch import open_transport

__all__ = ["HEADER_BYTES", "Mailbox", "Transport", "WaitGivenUpError", "open_transport"]
