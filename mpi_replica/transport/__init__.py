"""Moving bytes between ranks: one contract, two implementations."""

from .base import HEADER_BYTES, Transport, TransportTimeoutError
from .launch import open_transport

__all__ = ["HEADER_BYTES", "Transport", "TransportTimeoutError", "open_transport"]
