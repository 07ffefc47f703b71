"""What replicas contribute in tests, and what numpy makes of it: the reference, without ranks.

A contribution depends on a number and the replica id alone, never on the rank: every rank can make
those of all replicas. Values are small multiples of a half, so that sums are exact in any order.
"""

import dataclasses
import functools
import math

import hypothesis
import hypothesis.strategies as st
import ml_dtypes  # noqa: F401 - makes numpy know bfloat16
import numpy as np

from everywhere import holds_everywhere

#: On several ranks a failure is told at once: the search for a smaller one takes minutes.
at_once = hypothesis.settings(
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate], max_examples=12
)

INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
NARROW = ("float16", "bfloat16")
REAL = (*NARROW, "float32", "float64")
COMPLEX = ("complex64", "complex128")
STRUCTURED = np.dtype([("id", "i2"), ("place", "f8", (2,)), ("name", "S3")], align=True)
#: The dtypes that have a meaning under each op.
OF_OP = {
    "SUM": (*INTEGERS, *REAL, "longdouble", *COMPLEX, "clongdouble"),
    "MEAN": ("bool", *INTEGERS, *REAL, "longdouble", *COMPLEX),
    "MIN": ("bool", *INTEGERS, *REAL),
    "MAX": ("bool", *INTEGERS, *REAL),
    "PROD": (*INTEGERS, *REAL, "longdouble", *COMPLEX),
}
#: What all_gather takes beyond numbers.
OTHERS = ("U", "S", "datetime64[s]", "timedelta64[ms]", "V5", STRUCTURED)
LAYOUTS = ("C", "Fortran", "strided", "backwards", "big-endian", "read-only", "unaligned")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of a nest, before anybody knows which replica holds it."""

    dtype: object
    shape: tuple
    number: int = 0
    layout: int = 0  # where in LAYOUTS replica 0 is; the next one has the next layout
    axis: int | None = None  # along which the extent depends on the replica
    extents: tuple = (1,)  # these, in turn

    def of(self, replica):
        array = self.values(self.dtype, self.shape_of(replica), self.number, replica)
        return laid_out(array, LAYOUTS[(self.layout + replica) % len(LAYOUTS)])

    def shape_of(self, replica):
        shape = list(self.shape)
        if self.axis is not None:
            shape[self.axis] = self.extents[replica % len(self.extents)]
        return tuple(shape)

    def values(self, *about):
        return values(*about)

    def of_all(self, replicas):
        return [self.of(replica) for replica in range(replicas)]


def values(dtype, shape, number, replica):
    """Return an array that nobody else has."""
    if math.prod(shape) > MOST_KEPT:
        return made_values(dtype, shape, number, replica)
    return kept_values(dtype, shape, number, replica).copy()


def made_values(dtype, shape, number, replica):
    random = np.random.default_rng([number, replica])
    whole = random.integers(-4, 5, shape)
    if dtype in ("U", "S"):  # of another width on each replica
        words = [("é" if dtype == "U" else "e") * (abs(n) + replica) for n in whole.flat]
        return np.array(words, dtype).reshape(shape)
    dtype = np.dtype(dtype)
    if dtype.names:
        array = np.zeros(shape, dtype)
        array["id"], array["name"] = whole, whole.astype("S3")
        array["place"] = random.standard_normal((*shape, 2))
        return array
    if dtype.kind == "V" and dtype.name != "bfloat16":
        return np.frombuffer(random.bytes(whole.size * dtype.itemsize), dtype).reshape(shape)
    if dtype.kind == "b":
        return whole > 0
    if dtype.kind in "fc" or dtype.name == "bfloat16":
        # Products of any number of them are exact, in whatever order.
        whole = np.where(abs(whole) == 3, 1, whole) / 2
    if dtype.kind == "c":
        whole = whole * random.choice([1, 1j, 1 + 1j, 1 - 1j], shape)
    return np.asarray(abs(whole) if dtype.kind == "u" else whole, dtype)


#: Half of the time of tests that make the same calls again and again.
kept_values = functools.lru_cache(maxsize=256)(made_values)
MOST_KEPT = 4096


def laid_out(array, layout):
    """The same values, held in memory in another way."""
    if array.ndim == 0 and layout != "big-endian":
        return array
    if layout == "Fortran":
        return np.asfortranarray(array)
    if layout == "strided":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if layout == "backwards":
        return array[::-1].copy()[::-1]
    if layout == "big-endian" and array.dtype.name != "bfloat16":
        return array.astype(array.dtype.newbyteorder(">"))
    if layout == "read-only":
        array = array.copy()
        array.flags.writeable = False
    if layout == "unaligned":
        memory = np.empty(array.nbytes + 1, np.uint8)[1:]
        memory[:] = np.frombuffer(array.tobytes(), np.uint8)
        return memory.view(array.dtype).reshape(array.shape)
    return array


def native(array):
    return array.astype(array.dtype.newbyteorder("="))


def reduced(op, arrays):
    """The reference of all_reduce; the rules of dtypes are those of decision 5."""
    stack = np.stack([native(np.asarray(array)) for array in arrays])
    dtype, wide = stack.dtype, stack.dtype
    if dtype.name in NARROW:
        wide = np.dtype("float32")
    elif op == "MEAN" and dtype.kind in "biu":
        dtype = wide = np.dtype("float64")
    stack = stack.astype(wide)
    if op == "MEAN":
        result = np.add.reduce(stack, axis=0, dtype=wide) / len(arrays)
    else:
        ufunc = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum, "PROD": np.multiply}[op]
        result = ufunc.reduce(stack, axis=0, dtype=wide)
    return np.asarray(result, dtype)[()]


def gathered(arrays, axis):
    """The reference of all_gather."""
    return np.ascontiguousarray(np.concatenate([native(array) for array in arrays], axis=axis))


def build(nest, make):
    """The nest with `make(leaf)` for each Leaf in it."""
    if isinstance(nest, Leaf):
        return make(nest)
    if isinstance(nest, dict):
        return {key: build(value, make) for key, value in nest.items()}
    if hasattr(nest, "_fields"):
        return type(nest)(*(build(value, make) for value in nest))
    return type(nest)(build(value, make) for value in nest)


def nests(leaves):
    """Draw nests of lists, tuples and dicts."""
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        ),
        max_leaves=6,
    )


def check(result, expected):
    """Assert that a result is what the reference says, and an array of the promised kind."""
    if isinstance(expected, dict):
        assert isinstance(result, dict)
        assert list(result) == list(expected)
        for key, value in expected.items():
            check(result[key], value)
    elif isinstance(expected, (list, tuple)):
        assert type(result) is type(expected)
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            check(one, other)
    else:
        assert type(result) is type(expected)
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        if isinstance(result, np.ndarray):
            assert result.flags.c_contiguous
            assert result.flags.writeable
        if result.dtype.name == "bfloat16":
            result, expected = result.astype("float32"), expected.astype("float32")
        np.testing.assert_array_equal(result, expected, strict=True)


def arrays_in(result):
    """All arrays of a nest."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [array for inner in result for array in arrays_in(inner)]
    return [result] if isinstance(result, np.ndarray) else []


def check_everywhere(results, expected):
    """Check results of this rank's replicas; all ranks fail together."""

    def check_all():
        try:
            for result in results:
                check(result, expected)
            owned = [array for result in results for array in arrays_in(result) if array.size]
            for index, array in enumerate(owned):
                assert not any(np.shares_memory(array, other) for other in owned[:index])
        except AssertionError as error:
            error.add_note(f"results: {results}\nexpected: {expected}")
            raise

    holds_everywhere(check_all)
