"""A leaf as plain bytes: what is compared between ranks bit by bit, and shown where it differs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.digests import DIGEST_BYTES, digest_of_bytes
from ..core.dtypes import as_plain_array, wire_name
from ..core.pad_bytes import without_padding
from .agreement.site import bytes_of, function_identity
from .agreement.stand import LeafDescription

# Longer texts are not shown whole.
_SHOWN_CHARACTERS = 60
_BYTE = np.dtype(np.uint8)
_CHARACTER = np.dtype("U1")


@dataclasses.dataclass(frozen=True)
class Content:
    """A leaf as plain data: two are the same where their kinds and their bytes are."""

    #: What it is, as "float32[3, 4]". Short values that are no arrays stand here as a whole.
    kind: str
    #: How it is shown beside one of another kind.
    text: str
    #: The bytes of its elements in C order.
    data: npt.NDArray[np.uint8]
    dtype: np.dtype[Any] = _BYTE
    shape: tuple[int, ...] = ()

    def digest(self) -> bytes:
        """Returns 128 bits that stand for it."""
        whole = hashlib.blake2b(bytes_of(self.kind), digest_size=DIGEST_BYTES)
        whole.update(digest_of_bytes(self.data))
        return whole.digest()


def content_of(leaf: Any, path: str) -> Content:
    """Returns what is in a leaf; arrays in C order and of native byte order are not copied.

    Raises
    ------
    TypeError
        It has no bits that would be the same in another process.
    """
    if isinstance(leaf, str) and not isinstance(leaf, np.generic):
        data = str.__str__(leaf).encode("utf-32-le", "surrogatepass")
        return _content_of_text(repr(str.__str__(leaf)), "a str", data, _CHARACTER)
    if isinstance(leaf, bytes) and not isinstance(leaf, np.generic):
        return _content_of_text(repr(bytes(leaf)), "bytes", bytes(leaf), _BYTE)
    if leaf is None:
        return Content("None", "None", _bytes_of(b""))
    if type(leaf) is int and not -(1 << 63) <= leaf < 1 << 63:
        data = leaf.to_bytes(leaf.bit_length() // 8 + 1, "little", signed=True)
        text = hex(leaf) if leaf.bit_length() > 256 else str(leaf)
        return _content_of_text(text, "an int", data, _BYTE)
    if callable(leaf) and (isinstance(leaf, FunctionType) or hasattr(leaf, "__wrapped__")):
        function = function_identity(leaf)
        # two lambdas of one line have the same text
        return Content(f"{function.text} {function.digest.hex()}", function.text, _bytes_of(b""))
    is_number = isinstance(leaf, (np.ndarray, np.generic, int, float, complex))
    array = None
    if is_number or hasattr(leaf, "__array__"):
        try:
            array = as_plain_array(leaf)
        except Exception as error:  # each library has its own for what has no values
            raise TypeError(f"verify got {type(leaf).__qualname__} for {path}: {error}") from error
    if array is None or array.dtype.hasobject:
        what = type(leaf).__qualname__ if array is None else f"an array of dtype {array.dtype}"
        raise TypeError(
            f"verify got {what} for {path}: it has no bits that could be compared between"
            " ranks. Pass arrays of numbers, numbers, strings, bytes or None: of an object, those"
            " that it is made of."
        )
    return _content_of_array(array)


def _content_of_array(array: np.ndarray[Any, Any]) -> Content:
    name = wire_name(array.dtype)
    kind = str(LeafDescription(name, array.shape))
    text = f"{name} {_shown(array)}" if array.ndim == 0 else kind
    if array.nbytes == 0:
        return Content(kind, text, _bytes_of(b""), array.dtype, array.shape)
    array = without_padding(array)
    return Content(kind, text, array.reshape(-1).view(np.uint8), array.dtype, array.shape)


def _content_of_text(text: str, kind: str, data: bytes, dtype: np.dtype[Any]) -> Content:
    if len(text) <= _SHOWN_CHARACTERS:
        return Content(text, text, _bytes_of(b""))
    count = len(data) // dtype.itemsize
    kind = f"{kind} of {count} {'characters' if dtype is _CHARACTER else 'bytes'}"
    text = f"{kind} that begins with {text[:_SHOWN_CHARACTERS]}…"
    return Content(kind, text, _bytes_of(data), dtype, (count,))


def _bytes_of(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def element_name(content: Content, unit_bytes: int, index: int) -> str:
    """Returns the words for unit number `index` of the bytes: an element, or a byte of one."""
    element, byte = divmod(index * unit_bytes, max(content.dtype.itemsize, 1))
    where = [int(i) for i in np.unravel_index(element, content.shape)]
    name = f"element {where}" if where else "value"
    return name if unit_bytes == content.dtype.itemsize else f"byte {byte} of {name}"


def element_texts(content: Content, units: Sequence[bytes]) -> list[str]:
    """Returns how elements that differ are shown; with their bits where they print alike."""
    whole = content.dtype.itemsize
    texts = [
        _shown(np.frombuffer(unit, content.dtype)) if len(unit) == whole else unit.hex()
        for unit in units
    ]
    if len(set(texts)) == len(texts):
        return texts
    return [f"{text} ({_bits(unit, content)})" for text, unit in zip(texts, units, strict=True)]


def _shown(element: npt.NDArray[Any]) -> str:
    """Returns how the only element of an array is shown."""
    try:
        item: Any = element.reshape(())[()]
        text = repr(item.item()) if isinstance(item, (np.str_, np.bytes_)) else str(item)
    except (ValueError, SystemError):  # a time without a unit; characters that are none
        text = f"bytes {element.tobytes().hex(' ')}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _bits(unit: bytes, content: Content) -> str:
    """Returns the bits of an element: of one number as one number, the highest first."""
    if content.dtype.kind == "f":
        return f"0x{int.from_bytes(unit, 'little'):0{2 * len(unit)}x}"
    return f"bytes {unit.hex(' ')}"
