"""Moving bytes between ranks: one contract, two implementations."""

from .survivors import Dismissal
from .transport import HEADER_BYTES, Bytes, Messages, SharedMemoryError, Transport, WaitGivenUpError

__all__ = [
    "HEADER_BYTES",
    "Bytes",
    "Dismissal",
    "Messages",
    "SharedMemoryError",
    "Transport",
    "WaitGivenUpError",
]
