"""Bytes of every rank, of lengths that only their rank knows."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from .agreement import INLINE_BYTES
from .call import Call
from .engine import Engine

__all__ = ["LARGE_BYTES", "agree_on_blobs"]

#: What has a size that is known only after the ranks agreed is allocated then; above this size
#: the ranks agree once more that all of them could.
LARGE_BYTES = 1 << 20

_LENGTH = struct.Struct("<Q")
_INLINE, _FOLLOWS = b"\0", b"\1"


def agree_on_blobs(engine: Engine, calls: Sequence[Call], blob: bytes) -> list[memoryview]:
    """Agree that all ranks are at `calls`, and return the blob of each, in rank order. Collective.

    One message of 256 bytes a rank where all blobs fit into it, else one Allgatherv more, and one
    further small message where they have more than `LARGE_BYTES` together.
    """
    agreement = engine.agreement
    if len(blob) < INLINE_BYTES:
        payload = _INLINE + blob
    else:
        payload = _FOLLOWS + _LENGTH.pack(len(blob))
    try:
        engine.lay_by_reserve(LARGE_BYTES)
    except Exception as error:
        agreement.fail(calls, error)
    agreement.agree(calls, payload)
    payloads = agreement.payloads()
    if {data[:1] for data in payloads} == {_INLINE}:
        return [memoryview(data)[1:] for data in payloads]
    lengths = [
        len(data) - 1 if data[:1] == _INLINE else _LENGTH.unpack(data[1:])[0] for data in payloads
    ]
    if sum(lengths) > LARGE_BYTES:
        with agreement.preparing(calls):
            receive = np.empty(sum(lengths), np.uint8)
        agreement.agree(calls)
    else:
        receive = engine.with_reserve(lambda: np.empty(sum(lengths), np.uint8))
    with engine.moving(calls[0]):
        engine.carry(
            engine.transport.all_gather_blocks,
            np.frombuffer(blob, np.uint8),
            receive,
            lengths,
            calls[0].options.timeout_seconds,
        )
    ends = np.cumsum(lengths).tolist()
    return [receive[end - n : end].data for end, n in zip(ends, lengths, strict=True)]
