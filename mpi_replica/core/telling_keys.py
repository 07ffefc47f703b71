"""Keys of mappings that replicas can tell apart: each is known by what is written of it."""

from __future__ import annotations

import functools
from collections import Counter

from .array_ways import way_of
from .containers import plain_key
from .exceptions import StructureMismatchError
from .nest import ADDRESS, Structure
from .values import DistributedValues, Mirrored

# What is written of these is all that they are.
_PLAIN = frozenset({str, int})


@functools.lru_cache(maxsize=256)
def require_telling_keys(structure: Structure) -> None:
    """Raises where a key of a mapping reads as another one may: their values would be mixed up.

    Raises
    ------
    StructureMismatchError
        Keys of one mapping are written alike; or a key is written with its address, which other
        processes don't have; or it is a variable, a value per replica or an array, which are
        written as their values.
    """
    keys = structure.entries()
    if not _PLAIN.issuperset(map(type, keys)):
        texts = [repr(plain_key(key)) for key in keys]
        number = Counter(texts)
        for key, text in zip(keys, texts, strict=True):
            # A Mirrored equals what is in it, and is written as that.
            is_own = isinstance(key, DistributedValues) and not isinstance(key, Mirrored)
            is_value = is_own or way_of(type(key)) is not None
            is_address = not isinstance(key, (str, bytes)) and ADDRESS.search(text) is not None
            if is_value or is_address or number[text] > 1:
                name = type(key).__qualname__
                raise StructureMismatchError(
                    f"a nest has a key of type {name}, which replicas can't tell from others:"
                    " a key is known by what repr gives of it, the same on all ranks and another"
                    " one for each key. Use names as keys: strings, numbers or tuples of them."
                )
    if structure.num_nodes > len(structure) + 1:  # not all of its items are leaves
        for child in structure.children():
            require_telling_keys(child)
