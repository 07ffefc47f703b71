"""Elements of a dataset: nests of arrays and scalars, their specs, and how they stack.

Arrays of torch, JAX and others stay theirs: what is made of them is of the library of the first.
numpy does the work, on the memory that they have on the host.
"""

from __future__ import annotations

import datetime
import functools
import operator
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np

from ..core.array_libraries import (
    by_numpy,
    copy_of,
    dtype_of,
    give_back,
    to_numpy,
    values_of,
    way_back,
)
from ..core.array_ways import COMMON_TYPES
from ..core.exceptions import StructureMismatchError
from ..core.key_order import key_order, with_sorted_keys
from ..core.more_than_numbers import require_only_numbers
from ..core.nest import (
    Structure,
    flatten,
    flatten_plain,
    flatten_tensors,
    leaf_paths,
    map_structure,
    structure_text,
    unflatten,
)

# Of the commonest items of lists.
_KINDS = {str: "U", bytes: "S", float: "f", int: "i", bool: "b"}


@dataclass(frozen=True)
class ArraySpec:
    """Describe an array: its shape, with None for a length that is not fixed, and its dtype.

    Source: `tf.TensorSpec`.

    Parameters
    ----------
    shape : tuple of int or None
        The length of each axis.
    dtype : numpy.dtype
        That of the items.

    Examples
    --------
    >>> ArraySpec((None, 3), np.dtype("float32"))
    ArraySpec(shape=(None, 3), dtype=dtype('float32'))
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def spec_of(element: Any) -> Any:
    """Returns the nest of `ArraySpec` of an element."""
    return map_structure(lambda leaf: ArraySpec(tuple(leaf.shape), _dtype(leaf)), element)


def as_arrays(value: Any, where: Callable[[], str]) -> Any:
    """Returns the nest `value` with an array for each leaf; a list is one leaf, as in tf.

    `where` names it in an error.
    """
    leaves, structure = flatten_tensors(value)
    return unflatten(structure, _arrays_of(leaves, structure, where))


def own_arrays(value: Any, where: Callable[[], str]) -> Any:
    """Returns the `own_copy` of `as_arrays`: who made `value` may keep it, or fill it again."""
    leaves, structure = flatten_tensors(value)
    return unflatten(structure, map(_own_copy_of, _arrays_of(leaves, structure, where)))


def _arrays_of(leaves: Sequence[Any], structure: Structure, where: Callable[[], str]) -> list[Any]:
    arrays = []
    for place, leaf in enumerate(leaves):
        if type(leaf) in COMMON_TYPES:  # those of most rows: nothing need be looked at but numbers
            array = np.asarray(leaf)
            if array.dtype.kind in "biufc":
                arrays.append(array)
                continue

        def named(what: str, place: int = place) -> str:
            return f"{where()}: {what}{at(leaf_paths(structure)[place])}"

        arrays.append(_array_of(leaf, named))
    return arrays


def _array_of(leaf: Any, named: Callable[[str], str]) -> Any:
    """Returns the array of a leaf; `named` makes the words that begin an error."""
    if dtype_of(leaf) is not None:  # an error where it can't be taken
        return values_of(leaf)
    try:
        require_only_numbers(leaf, takes_labels=True)
        array = np.asarray(leaf)
        for part in _rows_in(leaf, array.ndim):
            require_only_numbers(part, takes_labels=True)
        if isinstance(leaf, (list, tuple)) and array.dtype.kind in "SUf":
            _require_one_kind(leaf, array.dtype)
        if array.dtype.kind == "f" and hasattr(leaf, "dtypes"):
            _require_exact_ints(leaf, array)
    except TypeError as error:
        raise TypeError(f"{named('the leaf')}: {error}") from None
    except ValueError as error:
        raise ValueError(
            f"{named(reprlib.repr(leaf))} can't become an array: {error} Give all its rows one"
            " length, or a tuple where it is several arrays."
        ) from error
    if array.dtype.kind in "OT":  # "T": numpy's texts of any width, whose rows are no arrays
        is_text = array.size > 0 or array.dtype.kind == "T"
        if array.ndim == 0 and getattr(leaf, "shape", None):  # a matrix of scipy.sparse, say
            raise TypeError(
                f"{named(f'a {type(leaf).__name__}')} is one object to numpy, without rows. Batch"
                " the numbers of its rows, Dataset.range(n).batch(n), and take value[rows] in the"
                " step; or give a dense one, value.toarray()."
            )
        if not is_text or not all(isinstance(item, str) for item in array.flat):
            raise TypeError(
                f"{named(reprlib.repr(leaf))} has dtype {array.dtype} as an array. Give numbers or"
                f" strings: {_way_to_numbers(leaf)}."
            )
        leaf = array.tolist()  # a column of texts of pandas, among others
        array = np.array(leaf, str).reshape(array.shape)
    if array.dtype.kind in "SU" and _ends_with_nul(leaf):
        raise ValueError(
            f"{named(reprlib.repr(leaf))} ends with a NUL, which numpy's texts lose. Give"
            " np.frombuffer(data, np.uint8) of bytes, or leave it out."
        )
    return array


def _way_to_numbers(leaf: Any) -> str:
    """Returns what makes numbers or strings of an object, or of those in a list."""
    leaf = next(_items_in(leaf), leaf)
    if leaf is None:
        return "a value is missing, or the return of a function"
    if hasattr(leaf, "columns"):  # a frame of pandas, say
        return "dict(frame) is a dict of its columns, each with its dtype"
    if is_dataclass(leaf):
        return "dataclasses.asdict(row) makes a dict of it"
    if hasattr(leaf, "toarray"):  # a matrix of scipy.sparse, say
        return "value.toarray() makes a dense one"
    if isinstance(leaf, (datetime.date, datetime.timedelta)):
        return "np.datetime64(date) or np.timedelta64(difference)"
    return ".astype(float) or .astype(str)"


def _require_one_kind(leaf: Any, made: np.dtype[Any]) -> None:
    """Raises where numpy gives the items of a list one dtype, and changes them by that."""
    is_int = False
    for item in _items_in(leaf):
        kind = _KINDS.get(type(item)) or np.asarray(item).dtype.kind
        is_int = kind in "biu"
        if made.kind == "f":
            if not is_int:
                return
        elif kind not in "SU":
            raise TypeError(
                f"{reprlib.repr(leaf)} has texts beside {type(item).__name__}, and all would be"
                " texts. Give a tuple of columns, each of one kind, or .astype(str)."
            )
    if is_int:  # the last one, and so all of them
        raise TypeError(
            f"{reprlib.repr(leaf)} has ints for which numpy takes {made}, which rounds large ones."
            " Give np.array(rows, dtype) with the dtype that you want."
        )


def _require_exact_ints(table: Any, array: np.ndarray[Any, Any]) -> None:
    """Raises where the ints of a frame or a column of pandas are too large for the floats made.

    They become floats beside floats, and beside missing values.
    """
    dtypes = table.dtypes if array.ndim > 1 else [table.dtypes]
    is_int = [getattr(dtype, "kind", "") in ("i", "u") for dtype in dtypes]
    columns = array if array.ndim > 1 else array[:, np.newaxis]
    if np.any(np.abs(columns[:, is_int]) >= 2 ** (np.finfo(array.dtype).nmant + 1)):
        raise TypeError(
            f"the {type(table).__name__} has ints beside floats or missing values, for which numpy"
            f" takes {array.dtype}: it rounds ints as large as these. Give dict(frame), in which"
            " each column keeps its dtype, and fill what is missing: fillna(-1).astype(int)."
        )


def _items_in(leaf: Any) -> Iterator[Any]:
    """Returns what is in lists, however deep; another leaf is its own only item."""
    for part in leaf if isinstance(leaf, (list, tuple)) else [leaf]:
        if isinstance(part, (list, tuple)):
            yield from _items_in(part)
        else:
            yield part


def _rows_in(leaf: Any, ndim: int) -> Iterator[Any]:
    """Returns what lists hold of an array with so many axes, but for its numbers."""
    if ndim > 1 and isinstance(leaf, (list, tuple)):
        for part in leaf:
            yield part
            yield from _rows_in(part, ndim - 1)


def _ends_with_nul(leaf: Any) -> bool:
    texts = (item for item in _items_in(leaf) if isinstance(item, (bytes, str)))
    return any(text[-1:] in (b"\0", "\0") for text in texts)


def stack(elements: Sequence[Any], numbers: Sequence[int], *, sorts_keys: bool) -> Any:
    """Returns the elements stacked leaf by leaf; `numbers` are their names in an error.

    Where elements have several orders of keys the batch has them sorted with `sorts_keys`.
    """
    flat = [flatten_plain(element) for element in elements]
    structure = flat[0][1]
    way = way_back(flat[0][0], is_of_call=False)
    rows = [leaves if way is None else [*map(to_numpy, leaves)] for leaves, _, _ in flat]
    orders = {key_order(elements[0], structure)}
    for element, number, (_, other, _) in zip(elements, numbers, flat, strict=True):
        if other is structure:
            continue
        if other != structure:
            raise ValueError(
                f"elements do not stack to a batch: element {numbers[0]} is "
                f"{structure_text(structure)}, element {number} is {structure_text(other)}. "
                "Give all elements one structure."
            )
        orders.add(key_order(element, structure))
        if len(orders) > 1 and not sorts_keys:
            raise _of_other_order(
                f"elements do not stack to a batch: elements {numbers[0]} and {number}"
            )
    stacked = [
        _stacked(column, numbers, structure, place)
        for place, column in enumerate(zip(*rows, strict=True))
    ]
    batch = unflatten(structure, give_back(stacked, way))
    return batch if len(orders) == 1 else with_sorted_keys(batch, structure)


def _stacked(
    column: Sequence[Any], numbers: Sequence[int], structure: Structure, place: int
) -> np.ndarray[Any, Any]:
    """Returns what elements have at one place of their structure, stacked."""
    first = column[0]
    if len({(type(leaf), leaf.shape, leaf.dtype) for leaf in column}) == 1:
        is_plain = type(first) in COMMON_TYPES and first.dtype.kind in "biufc" and first.ndim < 2
        if is_plain and first.dtype.isnative:  # a third of the time of `np.stack`
            return np.array(column)
        return np.stack(column)
    for number, leaf in zip(numbers, column, strict=True):
        if first.shape != leaf.shape or _kind(first) != _kind(leaf):
            raise ValueError(
                f"elements do not stack to a batch: element {numbers[0]} has shape {first.shape}"
                f" and dtype {first.dtype}, element {number} has shape {leaf.shape} and dtype"
                f" {leaf.dtype}{at(leaf_paths(structure)[place])}. Give all elements one shape and"
                " dtype, or use batch(1)."
            )
    stacked = np.stack(column)
    if stacked.dtype.kind == "f" and all(_dtype(leaf).kind in "biu" for leaf in column):
        by_dtype = {_dtype(leaf): number for number, leaf in zip(numbers, column, strict=True)}
        dtypes = ", ".join(f"element {n} has dtype {dtype}" for dtype, n in by_dtype.items())
        raise ValueError(
            f"elements do not stack to a batch: {dtypes}{at(leaf_paths(structure)[place])}. No"
            f" integers of numpy hold all of these, and {stacked.dtype} would round them. Give all"
            " elements one dtype, as map(lambda x: x.astype(...)) makes them."
        )
    return stacked


def unbatched(batch: Any, count: int) -> list[Any]:
    """Returns the `count` elements that are stacked in a batch of arrays of any library."""
    leaves, structure = flatten(batch)
    way = way_back(leaves, is_of_call=False)
    arrays = [*map(to_numpy, leaves)]
    return [
        unflatten(structure, give_back([array[row] for array in arrays], way))
        for row in range(count)
    ]


def own_copy(element: Any) -> Any:
    """Returns a copy that nobody else holds, with numpy scalars for arrays without axes."""
    return map_structure(_own_copy_of, element)


def _own_copy_of(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return copy_of(leaf)
    copy = np.array(leaf)
    return copy if copy.ndim else copy[()]


def no_rows_of(element: Any) -> Any:
    """Returns a batch of no elements like this one, in the byte order that `stack` gives."""

    def none(array: Any) -> Any:
        return np.empty((0, *array.shape), np.result_type(array.dtype))

    return map_structure(functools.partial(by_numpy, none), element)


def numpy_values(element: Any) -> Any:
    """Returns an element with numpy's arrays and scalars."""
    return map_structure(
        lambda leaf: leaf if dtype_of(leaf) is None else to_numpy(leaf)[()], element
    )


def row_count(batch: Any, where: Callable[[], str]) -> int:
    """Returns how many rows all leaves of a batch have; `where` names it in an error."""
    leaves, structure = flatten(batch)
    lengths = {leaf.shape[:1] for leaf in leaves}
    if len(lengths) == 1 and () not in lengths:
        return int(leaves[0].shape[0])
    shapes = ", ".join(
        f"{tuple(leaf.shape)}{at(path)}"
        for path, leaf in zip(leaf_paths(structure), leaves, strict=True)
    )
    raise ValueError(
        f"{where()} is no batch: its leaves have the shapes {shapes or 'of none'}. Give "
        "arrays whose first axis are the rows, as many in each."
    )


def rows_of(batch: Any, wanted: slice) -> Any:
    """Returns the wanted rows of a batch."""
    # all axes are named: the array API standard wants it
    return map_structure(operator.itemgetter((wanted, ...)), batch)


def parts_of(batch: Any, wanted: Sequence[slice]) -> list[Any]:
    """Returns the wanted parts of the rows of a batch."""
    return [rows_of(batch, part) for part in wanted]


def require_fit(one: Any, other: Any, where: str) -> None:
    """Raises unless elements with these specs can follow one another: shapes may differ.

    Raises
    ------
    TypeError
        As in tf: they differ in structure, number of axes or dtype.
    """
    specs, structure = flatten(one)
    others, structure_of_other = flatten(other)
    if structure != structure_of_other:
        raise TypeError(
            f"{where}: elements are {structure_text(structure)} first and then "
            f"{structure_text(structure_of_other)}. Give all elements one structure."
        )
    for path, spec, then in zip(leaf_paths(structure), specs, others, strict=True):
        # The widths of texts may differ, as the lengths of axes.
        is_text = spec.dtype.kind in "SU" and spec.dtype.kind == then.dtype.kind
        if len(spec.shape) != len(then.shape) or not (spec.dtype == then.dtype or is_text):
            raise TypeError(
                f"{where}: elements have shape {spec.shape} and dtype {spec.dtype} first and then "
                f"shape {then.shape} and dtype {then.dtype}{at(path)}. Give all elements one dtype "
                "and number of axes, as map(lambda x: x.astype(...)) makes them."
            )


def require_alike(one: Any, other: Any, where: str) -> None:
    """Raises unless elements that were read, with these specs, can follow one another.

    Raises
    ------
    StructureMismatchError
        What `require_fit` tells. So it is where each was read by a rank of its own.
    """
    try:
        require_fit(one, other, where)
    except TypeError as error:
        raise StructureMismatchError(str(error)) from None
    if key_order(one) != key_order(other):
        raise _of_other_order(f"{where}: elements")


def _of_other_order(what: str) -> StructureMismatchError:
    """Returns the error of rows that ranks read by themselves: a loop over keys would mix them."""
    return StructureMismatchError(
        f"{what} have their keys in different orders. Give all rows one order of keys, as"
        " dict(sorted(row.items())) has."
    )


def common_spec(one: Any, other: Any) -> Any:
    """Returns the spec of elements of either spec, where they fit."""

    def common(spec: ArraySpec, then: ArraySpec) -> ArraySpec:
        lengths = zip(spec.shape, then.shape, strict=True)
        shape = tuple(length if length == new else None for length, new in lengths)
        is_same = spec.dtype == then.dtype  # also in byte order, which promoting loses
        dtype = spec.dtype if is_same else np.promote_types(spec.dtype, then.dtype)
        return ArraySpec(shape, dtype)

    specs, structure = flatten(one)
    others, _ = flatten(other)
    return unflatten(structure, [common(*pair) for pair in zip(specs, others, strict=True)])


def concatenate(parts: Sequence[Any]) -> Any:
    """Returns the parts, nests of one structure and dtypes, joined leaf by leaf along axis 0."""
    structure = flatten(parts[0])[1]
    columns = zip(*(flatten(part)[0] for part in parts), strict=True)
    return unflatten(structure, [by_numpy(_concatenated, *column) for column in columns])


def at(path: str) -> str:
    """Returns the words for a path in a message; a lone array has none."""
    return f" at {path}" if path else ""


def _concatenated(*arrays: Any) -> Any:
    return np.concatenate(arrays, dtype=arrays[0].dtype)  # also in its byte order


def _dtype(leaf: Any) -> np.dtype[Any]:
    foreign = dtype_of(leaf)
    dtype: np.dtype[Any] = leaf.dtype if foreign is None else foreign
    return dtype


def _kind(leaf: Any) -> str:
    # Numbers promote to one another; a number among texts would silently become a text.
    try:
        kind = leaf.dtype.kind
    except AttributeError:  # a tensor of torch, among arrays of numpy
        kind = _dtype(leaf).kind
    return "number" if kind in "biufc" else str(kind)
