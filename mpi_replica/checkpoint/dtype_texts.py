"""What stands for a dtype in JSON: a text, or those of its fields with where they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.dtypes import is_of_another_library


def dtype_text(dtype: np.dtype[Any]) -> Any:
    """Returns what stands for a dtype in JSON.

    Raises
    ------
    TypeError
        It has objects, or is of a package other than numpy and ml_dtypes.

    Examples
    --------
    >>> dtype_text(np.dtype("float32")), dtype_text(np.dtype([("x", "i2")]))
    ('<f4', [['x', '<i2', [], 0, None], 2])
    """
    if dtype.fields is not None:
        fields = []
        for name in dtype.names or ():  # the fields have some twice, also under their titles
            field, offset, *title = dtype.fields[name]
            base, shape = field.subdtype or (field, ())
            text = title[0] if title else None
            if not isinstance(text, str | None):
                raise TypeError(f"{dtype} has the title {text!r}, which is no text")
            fields.append([name, dtype_text(base), list(shape), offset, text])
        return [*fields, dtype.itemsize]
    if dtype.type.__module__ == _NAMED:  # no code of numpy's tells them from plain bytes
        return dtype.name
    if dtype.hasobject or is_of_another_library(dtype):
        raise TypeError(f"{dtype} is no dtype of plain numbers or texts")
    return dtype.str


_NAMED = "ml_dtypes"


def dtype_from(text: Any) -> np.dtype[Any]:
    """Undoes `dtype_text`.

    Raises
    ------
    ValueError, TypeError, AttributeError, ImportError
        It stands for no dtype, or for one of objects; a program that has no ml_dtypes can't have
        theirs.
    """
    if isinstance(text, list):
        *fields, size = text
        if not fields:
            return np.dtype({"names": [], "formats": [], "itemsize": size})
        names, dtypes, shapes, offsets, titles = zip(*fields, strict=True)
        formats = [(dtype_from(d), tuple(s)) for d, s in zip(dtypes, shapes, strict=True)]
        about: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
        made: np.dtype[Any] = np.dtype(about | {"titles": titles} if any(titles) else about)
        return made
    if not isinstance(text, str):
        raise TypeError(f"{text!r} stands for no dtype")
    if not text.startswith(("<", ">", "|", "=")):
        import ml_dtypes  # the program that wrote it had it

        scalar_type = getattr(ml_dtypes, text)
        if not (isinstance(scalar_type, type) and issubclass(scalar_type, np.generic)):
            raise TypeError(f"{text!r} stands for no dtype")
        return np.dtype(scalar_type)
    dtype = np.dtype(text)
    if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None:
        raise ValueError(f"{text!r} stands for no dtype of plain numbers or texts")
    return dtype
