"""The arrays of a variable on a rank, and what fits into them.

An array that anybody else holds is never written in place: an assignment puts a new one in the
place of the old one, so that what was read before stays what it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..collectives.broadcast import Writing
from ..core.array_ways import Array
from ..core.dtypes import accumulation, as_array, integer_limits, like_numpys
from ..core.exceptions import RankLostError
from ..core.indexed_slices import IndexedSlices
from ..core.options import ReduceOp, VariableAggregation

_ASSIGN: dict[str, np.ufunc | None] = {
    "assign": None,
    "assign_add": np.add,
    "assign_sub": np.subtract,
}

# How rows are combined with those that are there, and what they are in the words of a reduction.
SCATTER: dict[str, tuple[np.ufunc, ReduceOp] | None] = {
    "scatter_add": (np.add, ReduceOp.SUM),
    "scatter_sub": (np.subtract, ReduceOp.SUM),
    "scatter_min": (np.minimum, ReduceOp.MIN),
    "scatter_max": (np.maximum, ReduceOp.MAX),
    "scatter_update": None,
}

# Few enough that what is computed with them stays in the cache.
_BLOCK_ITEMS = 1 << 16


class Storage:
    """The arrays of a variable on this rank: one, or one for each local replica.

    Parameters
    ----------
    identity : str
        Tells the variable from all others, the same on every rank.
    values : dict
        The array of each local replica, or one under None.
    quietly : callable
        Calls a function without numpy's warnings: see `Engine`.
    """

    def __init__(
        self, identity: str, values: dict[int | None, Array], quietly: Callable[..., Any]
    ) -> None:
        self.identity = identity
        self._quietly = quietly
        self._values: dict[int | None, Array] = {}
        # Replicas whose components went with a rank, until they are written again.
        self._lost: set[int | None] = set()
        #: How often arrays were written other than by a replica alone.
        self.writes_above = 0
        self.put(values)
        #: Whether nothing was written since.
        self.is_as_made = True

    @property
    def keys(self) -> tuple[int | None, ...]:
        """Whose arrays there are."""
        return tuple(self._values)

    @property
    def any_array(self) -> Array:
        """One of the arrays: all have one dtype and shape."""
        return next(iter(self._values.values()))

    def read(self, key: int | None) -> Array:
        """Returns an array, read-only.

        Raises
        ------
        RankLostError
            It is lost.
        ValueError
            Another strategy, which has that replica on this rank, asks for it.
        """
        if key in self._lost:
            why = "value any more: it is not part of what was gone back to when a rank was lost"
            if key is not None:
                why = "components any more: replicas have moved since a rank was lost"
            raise RankLostError(
                f"{self.identity} has no {why}. Hold it in the mr.ElasticState, and make it before"
                " run_elastic, or assign to it first, in the function that is given to run_elastic."
            )
        try:
            return self._values[key]
        except KeyError:
            raise ValueError(
                f"{self.identity} has components for the replicas {list(self._values)} on this"
                f" rank, and not for replica {key}. Mixing different strategies: give it to its"
                " own, or its value."
            ) from None

    @property
    def is_lost(self) -> bool:
        """Whether some of the arrays are lost."""
        return bool(self._lost)

    def replace(self, values: Mapping[int | None, Array]) -> None:
        """Holds these arrays, and no others; nobody else holds them."""
        self._values, self._lost = {}, set()
        self.put(values)

    def lose(self, keys: Iterable[int | None]) -> None:
        """Holds arrays of other replicas, whose values are lost until they are written."""
        self.writes_above += 1
        self.is_as_made = False
        self._values = dict.fromkeys(keys, self.any_array)
        self._lost = set(self._values)

    def write(self, key: int | None, how: str, value: Array | IndexedSlices) -> None:
        """Writes a `fitting` value: "assign" it, or what else `how` says."""
        self._put(key, self._quietly(_written, how, self._old(key, how), value))

    def _old(self, key: int | None, how: str) -> Array:
        return self.any_array if how == "assign" and key in self._values else self.read(key)

    def write_for_now(
        self, key: int | None, how: str, value: Array | IndexedSlices
    ) -> Callable[[], None]:
        """Writes as `write` does; returns what takes it back, if not all ranks do the same."""
        take_back = self.way_back(key)
        self.write(key, how, value)
        return take_back

    def way_back(self, key: int | None) -> Callable[[], None]:
        """Returns what puts the array of now in the place of what will have been written."""
        before, was_lost = self._values[key], key in self._lost

        def take_back() -> None:
            self._values[key] = before
            if was_lost:
                self._lost.add(key)

        return take_back

    def refill(self, fill: Callable[[Array], None], num_parts: int | None = None) -> None:
        """Gives all replicas one value, which `fill` writes into an array.

        It is written where the old one is, unless anybody else holds that. If `fill` raises, the
        value may be half written.

        Parameters
        ----------
        fill : callable
        num_parts : int, optional
            Each replica gets its part, of so many whose sum is the value.
        """
        array = self.any_array
        places = [id(value) for value in self._values.values()].count(id(array))
        alone = np.empty(0)
        # Views and buffers hold the array in whose memory they look.
        is_seen = sys.getrefcount(array) - sys.getrefcount(alone) > places
        if is_seen or not (array.flags.owndata and array.flags.c_contiguous):
            array = np.empty(array.shape, array.dtype)
        array.flags.writeable = True
        self.writes_above += 1
        self.is_as_made = False
        try:
            fill(array)
            self._values = dict.fromkeys(self._values, array)
            self._lost.clear()
            if num_parts is not None:
                self._divide(array, num_parts)
        finally:
            array.flags.writeable = False

    def _divide(self, total: Array, count: int) -> None:
        """Gives each replica its part of the total, which the first one's takes the place of."""
        first, *others = self._values
        for key in (*others, first):
            part = total if key == first else np.empty_like(total)
            numbers, of_part = total.reshape(-1), part.reshape(-1)
            for start in range(0, total.size, _BLOCK_ITEMS):
                block = slice(start, start + _BLOCK_ITEMS)
                of_part[block] = part_of(numbers[block], count, key or 0)
            self._put(key, part)

    def _put(self, key: int | None, value: Array) -> None:
        value.flags.writeable = False
        self.is_as_made = False
        self._values[key] = value
        self._lost.discard(key)

    def put(self, arrays: Mapping[int | None, Array]) -> None:
        """Holds these arrays in the place of those that are there."""
        self.writes_above += 1
        for key, array in arrays.items():
            self._put(key, array)

    def fitting(self, name: str, how: str, value: Any) -> Array | IndexedSlices:
        """Returns `value` as an array of the variable's dtype and shape, or as rows of one.

        Raises
        ------
        TypeError, ValueError, IndexError
            It has another shape, or a dtype that does not fit; an index is none of a row.
        """
        if how in SCATTER:
            return self._fitting_rows(name, how, value)
        fitting = self._fitting_array(name, how, value, self.any_array.shape)
        nothing = np.empty(0, fitting.dtype)
        _written(how, nothing, nothing)  # numpy has no such operation for some dtypes
        return fitting

    def _fitting_rows(self, name: str, how: str, value: Any) -> IndexedSlices:
        array = self.any_array
        if not isinstance(value, IndexedSlices):
            raise TypeError(
                f"{name}.{how} got {type(value).__name__}. Give it rows:"
                " mr.IndexedSlices(values, indices)."
            )
        if array.ndim == 0:
            raise ValueError(f"{name}.{how}: a variable of shape () has no rows. Use assign.")
        combining = SCATTER[how]
        if combining is not None:
            try:
                accumulation(array.dtype, combining[1])
            except TypeError as error:
                raise TypeError(f"{name}.{how}: {error}") from None
        indices = value.indices.astype(np.int64)
        outside = np.flatnonzero((indices < 0) | (indices >= len(array)))
        if outside.size:
            place = outside[0]
            raise IndexError(
                f"{name}.{how} got index {value.indices[place]} (indices[{place}]) for a variable"
                f" of shape {array.shape}. Give indices from 0 to {len(array) - 1}."
            )
        if value.dense_shape not in (None, array.shape):
            raise ValueError(
                f"{name}.{how} got dense_shape {value.dense_shape} for a variable of shape"
                f" {array.shape}. Give its shape, or none."
            )
        rows = (len(indices), *array.shape[1:])
        values = self._fitting_array(name, how, value.values, rows)
        wide = value.wide_values if values.dtype == value.values.dtype else values
        return IndexedSlices.of_replicas(wide, values.dtype, indices, array.shape, [len(indices)])

    def _fitting_array(self, name: str, how: str, value: Any, shape: tuple[int, ...]) -> Array:
        dtype, what = self.any_array.dtype, f"{name}.{how}"
        if isinstance(value, IndexedSlices):
            raise TypeError(
                f"{what} got IndexedSlices. scatter_update, scatter_add and scatter_sub take"
                " them; or give all rows: value.to_dense()."
            )
        array = _castable(what, value, dtype, is_first=False)
        if array.shape != shape:
            wanted = "Give rows of" if how in SCATTER else "Give a value of"
            raise ValueError(
                f"{what} got shape {array.shape} for a variable of shape"
                f" {self.any_array.shape}. {wanted} its shape."
            )
        return np.asarray(array, dtype=dtype, order="C")


def initial_array(name: str, value: Any, dtype: Any) -> Array:
    """Returns the first value of a variable, as an array of its own; `dtype` may be None.

    Raises
    ------
    TypeError, ValueError, OverflowError
        It is no array, or that dtype can't hold it; it is no dtype.
    """
    if dtype is None:
        return np.array(_array(name, value), order="C")
    try:
        wanted = np.dtype(dtype)
    except Exception:  # numpy raises many kinds
        raise TypeError(f"{name}: dtype must be one of numpy's, got {dtype!r}.") from None
    return np.array(_castable(name, value, wanted, is_first=True), dtype=wanted, order="C")


def _array(what: str, value: Any) -> Array:
    try:
        return as_array(value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{what}: {error}") from error


def _castable(what: str, value: Any, dtype: np.dtype[Any], *, is_first: bool) -> Array:
    """Returns `value` as an array that a cast to `dtype` leaves what it is.

    A list of ints has 64 bits, and an empty one is float64: of a first value they only need fit.
    """
    array, ours = _array(what, value), like_numpys(dtype)
    if type(value) in (int, float, complex):  # numbers that numpy counts as weak
        try:  # of int4, ml_dtypes 0.7.0 makes int4 here, and wraps a large number around
            array = np.asarray(value, np.result_type(ours if ours.kind in "iu" else dtype, value))
        except OverflowError:
            raise _overflow(what, value, dtype) from None
        except TypeError:  # a record, say
            raise _other_dtype(what, array.dtype, dtype) from None
    elif ours.kind in "iu" and array.dtype.kind in "fO" and isinstance(value, (list, tuple)):
        array = _ints_of(what, value, dtype, array)
    are_ints = ours.kind in "iu" and array.dtype.kind in "biu"
    need_fit_only = is_first and (are_ints or not array.size)
    casts = (array.dtype, dtype), (like_numpys(array.dtype), ours)
    if not (need_fit_only or all(np.can_cast(a, b, "same_kind") for a, b in casts)):
        raise _other_dtype(what, array.dtype, dtype)
    if are_ints and array.dtype != dtype and array.size:
        _require_fit(what, array, dtype)
    return array


def _ints_of(what: str, value: Any, dtype: np.dtype[Any], array: Array) -> Array:
    """Returns a nested list of ints in `dtype`; of others `array`, which numpy makes of it.

    Of ints that have no dtype in common numpy makes floats, or objects.
    """
    numbers = np.array(value, dtype=object)
    if not numbers.size or not all(
        isinstance(number, (int, np.integer)) for number in numbers.flat
    ):
        return array
    _require_fit(what, numbers, dtype)
    return numbers.astype(dtype)


def _require_fit(what: str, integers: Array, dtype: np.dtype[Any]) -> None:
    least, greatest = integer_limits(dtype)
    for number in (int(integers.min()), int(integers.max())):
        if not least <= number <= greatest:  # the cast would wrap it around
            raise _overflow(what, number, dtype)


def _other_dtype(what: str, dtype: np.dtype[Any], wanted: np.dtype[Any]) -> TypeError:
    advice = f"value.astype({wanted.name!r})" if wanted.names is None else "np.array(value, dtype)"
    return TypeError(
        f"{what} got dtype {dtype} for a variable of dtype {wanted}. Convert it: {advice}."
    )


def _overflow(what: str, number: Any, dtype: np.dtype[Any]) -> OverflowError:
    is_short = not isinstance(number, int) or number.bit_length() <= 128  # Python writes no others
    text = number if is_short else f"an int of {number.bit_length()} bits"
    return OverflowError(
        f"{what} got {text}, which a variable of dtype {dtype} can't hold. Make the variable of"
        " a wider one."
    )


class StorageWriting(Writing):
    """An assignment to some of the arrays of a variable, of one value or parts of it.

    For `num_parts` see `Storage.refill`.
    """

    def __init__(
        self, storage: Storage, keys: Sequence[int | None], how: str, num_parts: int | None = None
    ) -> None:
        self._storage = storage
        self._keys = keys
        self._how = how
        self._num_parts = num_parts
        #: Whether it takes memory that `prepare` can't tell.
        self.may_fail = how in SCATTER or num_parts is not None
        self._new: dict[int | None, Array] = {}

    def prepare(self) -> None:
        """Takes the memory for new arrays."""
        if not self.may_fail:
            self._new = {key: np.empty_like(self._storage.any_array) for key in self._keys}
        for key in self._keys:
            self._storage._old(key, self._how)  # an error where it is lost

    def compute(self, value: Array | IndexedSlices) -> None:
        """Works out the new arrays."""
        if self._num_parts is not None:
            total, count = np.asarray(value), self._num_parts
            self._new = {key: part_of(total, count, key or 0) for key in self._keys}
            return
        storage = self._storage
        for key in self._keys:
            old = storage._old(key, self._how)
            made = storage._quietly(_written, self._how, old, value, self._new.get(key))
            self._new[key] = made

    def commit(self) -> None:
        """Puts the new arrays in the place of the old ones."""
        self._storage.put(self._new)


def _written(how: str, old: Array, value: Array | IndexedSlices, new: Array | None = None) -> Array:
    """Returns what is there after an assignment, in the memory of `new` where that is given."""
    if isinstance(value, IndexedSlices):
        return _scattered(how, old, value)
    if new is None:
        new = np.empty_like(old)
    ufunc = _ASSIGN[how]
    if ufunc is None:
        np.copyto(new, value, casting="unsafe")
    else:
        dtype = old.dtype.newbyteorder("=")  # numpy adds in no other one
        ufunc(old, value, out=new, casting="unsafe", dtype=dtype)
    return new


def _scattered(how: str, old: Array, rows: IndexedSlices) -> Array:
    combining = SCATTER[how]
    if combining is None:  # numpy does not promise that the last row of an index wins
        indices, from_end = np.unique(rows.indices[::-1], return_index=True)
        new = old.copy()
        new[indices] = rows.values[::-1][from_end]
        return new
    ufunc, op = combining
    wide, _ = accumulation(old.dtype, op)
    new = old.astype(wide)
    ufunc.at(new, rows.indices, rows.wide_values.astype(wide, copy=False))
    return new.astype(old.dtype, copy=False)


def part_of(total: Array, count: int, index: int) -> Array:
    """Returns one of `count` arrays, about equal, whose sum is `total`.

    In whatever order they are added up, it is `total` to the bit (but for those of NaN): each part
    is a multiple of the last digit of the total, and so is what some of them add up to.
    """
    dtype = total.dtype
    if dtype.kind == "c":
        part = np.empty_like(total)
        part.real, part.imag = (part_of(x, count, index) for x in (total.real, total.imag))
        return part
    if dtype.kind in "iu":
        wide = total if dtype.itemsize == 8 else total.astype(np.int64)
        least = wide // count
        return np.asarray(least + (index < wide - least * count)).astype(dtype)
    wide = total if dtype.itemsize >= 8 else total.astype(np.float64)
    with np.errstate(all="ignore"):
        digit = (total - np.nextafter(total, np.zeros_like(total))).astype(wide.dtype)
        part = np.trunc(wide / count / digit) * digit
        if index == 0:
            part = wide - (count - 1) * part
        has_digits = np.isfinite(wide) & (wide != 0)
        return np.where(has_digits, part, wide).astype(dtype)


def check_dtype(name: str, dtype: np.dtype[Any], mode: VariableAggregation) -> None:
    """Raises unless a variable can have `dtype` under this aggregation.

    Raises
    ------
    TypeError, ValueError
        It is no dtype of numbers, or MEAN of it has no meaning.
    """
    if dtype.hasobject or dtype.kind in "SUMm":
        raise TypeError(f"{name}: a variable holds numbers, got dtype {dtype}.")
    if mode is VariableAggregation.MEAN and like_numpys(dtype).kind in "biu":
        raise ValueError(
            f"{name}: aggregation MEAN needs a float dtype, got {dtype}: a mean of integers is"
            " none. Use SUM, ONLY_FIRST_REPLICA, or a float dtype."
        )
