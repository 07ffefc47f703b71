"""Decision 5: which dtype a reduction accumulates in; and arrays ready to travel."""

import ml_dtypes
import numpy as np
import pytest

from contributions import LAYOUTS, laid_out
from mpi_replica.core import nest
from mpi_replica.core.dtypes import accumulation, as_arrays, as_plain_array, is_text, wire_name
from mpi_replica.core.options import ReduceOp

INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = [np.dtype(name) for name in ("float32", "float64")]
COMPLEX = [np.dtype(name) for name in ("complex64", "complex128", "clongdouble")]
OTHERS = ["U3", "S2", "O", "M8[s]", "m8[s]", "V4", [("a", "i4")]]


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_decision_5_narrow_floats_accumulate_in_float32_and_stay_what_they_are(op, dtype):
    assert accumulation(np.dtype(dtype), op) == (np.float32, np.dtype(dtype))


@pytest.mark.parametrize("dtype", [*INTEGERS, np.dtype(bool)], ids=str)
def test_decision_5_mean_of_integers_and_bools_is_float64(dtype):
    assert accumulation(dtype, ReduceOp.MEAN) == (np.float64, np.float64)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *COMPLEX, np.dtype("longdouble")], ids=str)
def test_decision_5_sum_keeps_the_dtype(dtype):
    assert accumulation(dtype, ReduceOp.SUM) == (dtype, dtype)
    assert accumulation(dtype, ReduceOp.PROD) == (dtype, dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, np.dtype("longdouble")], ids=str)
def test_decision_5_mean_keeps_the_dtype_of_floats(dtype):
    assert accumulation(dtype, ReduceOp.MEAN) == (dtype, dtype)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, np.dtype(bool)], ids=str)
def test_min_and_max_keep_the_dtype(dtype):
    assert accumulation(dtype, ReduceOp.MIN) == (dtype, dtype)
    assert accumulation(dtype, ReduceOp.MAX) == (dtype, dtype)


@pytest.mark.parametrize("dtype", ["?", "i1", ">i4", "f8", ">c16"])
def test_a_result_has_no_metadata_whichever_of_equal_dtypes_came_before(dtype):
    accumulation.cache_clear()
    for metadata in ({"enum": 1}, {"enum": 2}, None):
        leaf = np.dtype(dtype) if metadata is None else np.dtype(dtype, metadata=metadata)
        op = ReduceOp.SUM if leaf.kind == "c" else ReduceOp.MAX
        for found in accumulation(leaf, op):
            assert found == leaf.newbyteorder("=")
            assert found.isnative
            assert found.metadata is None


@pytest.mark.parametrize("codes", ["lq", "ql", "LQ", "QL"])
def test_a_result_is_of_one_class_whichever_of_equal_dtypes_came_before(codes):
    """int64 and longlong are equal, and their scalars are of two classes."""
    accumulation.cache_clear()
    kinds = {one.type for code in codes for one in accumulation(np.dtype(code), ReduceOp.SUM)}
    assert kinds == {np.uint64 if codes.isupper() else np.int64}


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_decision_5_what_is_no_number_is_a_type_error_that_names_op_and_dtype(op, dtype):
    with pytest.raises(TypeError, match=op.name) as caught:
        accumulation(np.dtype(dtype), op)
    assert np.dtype(dtype).name in str(caught.value)


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize(
    ("name", "wide"),
    [
        ("int2", "int8"),
        ("int4", "int8"),
        ("uint4", "uint8"),
        ("float8_e4m3b11fnuz", "float32"),
        ("complex32", "complex64"),
        ("bcomplex32", "complex64"),
    ],
)
def test_numbers_that_are_not_reduced_as_they_are_have_an_error_with_a_wider_dtype(op, name, wide):
    text = rf"{op.name} of {name} is not supported. Convert the leaf first, \.astype\('{wide}'\)"
    with pytest.raises(TypeError, match=text):
        accumulation(np.dtype(getattr(ml_dtypes, name)), op)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PROD])
def test_decision_5_sum_of_bools_says_what_to_do(op):
    with pytest.raises(TypeError, match=r"integer.*MIN \(all\) or MAX \(any\)"):
        accumulation(np.dtype(bool), op)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers_have_no_order(dtype):
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        with pytest.raises(TypeError, match="order"):
            accumulation(dtype, op)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3)])
@pytest.mark.parametrize("dtype", ["int16", "float64", "complex64", "U3", "M8[s]"])
def test_decision_6_a_plain_array_has_the_values_in_native_c_order(dtype, shape, layout):
    given = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype("m8[s]").astype("i8")
    given = given.astype(dtype)
    plain = as_plain_array(laid_out(given, layout))
    assert type(plain) is np.ndarray
    assert plain.dtype == given.dtype
    assert plain.dtype.isnative
    assert plain.shape == shape
    assert plain.flags.c_contiguous
    assert plain.flags.aligned
    np.testing.assert_array_equal(plain, given)


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        (([1.0, 2.0],), [("a", ">f4", 2)]),
        ((1, ([2.0, 3.0], "d")), [("a", "i1"), ("b", [("c", ">f4", 2), ("d", "U3")])]),
        ((1, [2, 3]), {"names": ["a", "b"], "formats": ["<i4", (">i2", 2)], "offsets": [8, 0]}),
    ],
)
def test_fields_that_are_arrays_have_native_byte_order_in_a_plain_array(row, fields):
    given = np.array([row, row], fields)
    plain = as_plain_array(given)
    assert plain.dtype == given.dtype.newbyteorder("=")
    np.testing.assert_array_equal(plain, given)


def test_an_array_that_is_plain_already_is_not_copied():
    pairs = np.zeros(2, [("a", "i1"), ("b", "f4", 2)])
    for array in (np.ones((2, 3)), np.array(1.0), laid_out(np.ones(3), "read-only"), pairs):
        assert as_plain_array(array) is array


@pytest.mark.parametrize("value", [1, 2.5, True, np.float16(3), [1, 2]])
def test_numbers_become_arrays(value):
    np.testing.assert_array_equal(as_plain_array(value), np.asarray(value), strict=True)


@pytest.mark.parametrize("value", [np.arange(3), [1.5, np.arange(2)], [True, "a", np.int8(2)], []])
def test_leaves_are_the_same_arrays_whether_it_is_known_that_they_are_plain(value):
    leaves, _, plain = nest.flatten_plain(value)
    for arrays, way in (as_arrays(leaves, plain), as_arrays(leaves)):
        assert way is None
        assert all(type(array) is np.ndarray for array in arrays)
        assert [array.dtype for array in arrays] == [np.asarray(leaf).dtype for leaf in leaves]
        expected = [np.asarray(leaf) for leaf in leaves]
        assert [array.tolist() for array in arrays] == [array.tolist() for array in expected]


def test_a_masked_array_is_refused_among_leaves():
    leaves, _, plain = nest.flatten_plain([1.0, np.ma.masked_array([1, 2], [0, 1])])
    with pytest.raises(TypeError, match="the mask would be lost"):
        as_arrays(leaves, plain)


def test_strings_alone_may_differ_in_item_size():
    assert [is_text(np.dtype(name)) for name in ("U1", "S9", "f4", "V3", "M8[s]")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_wire_names_tell_all_dtypes_apart():
    dtypes = [
        *("bool", "int8", "uint8", "float16", "float32", "float64", "longdouble", "complex64"),
        *(ml_dtypes.bfloat16, "V2", "V3", "S2", "U2", "M8[s]", "M8[ms]", "m8[s]", "M8[25s]"),
        [("a", "i4")],
        [("b", "i4")],
        [("a", "f4")],
        [("a", "i4", (2,))],
        [("a", "i4", (1, 2))],
        [("a", [("b", "i4")])],
        [("a", ml_dtypes.bfloat16)],
        [("a", "V2")],
        np.dtype([("a", "i1"), ("b", "i4")]),
        np.dtype([("a", "i1"), ("b", "i4")], align=True),
        np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [4, 0]}),
        np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]}),
    ]
    names = [wire_name(np.dtype(dtype)) for dtype in dtypes]
    assert len(set(names)) == len(names)
    assert not any("0x" in name for name in names)


def test_one_dtype_has_one_wire_name_however_it_is_spelled():
    assert wire_name(np.dtype("l")) == wire_name(np.dtype("q")) == wire_name(np.dtype("int64"))
    assert wire_name(np.dtype("M8[1s]")) == wire_name(np.dtype("M8[s]"))
