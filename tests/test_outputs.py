"""Where the arrays of ``out=`` lie."""

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.array_utils import byte_bounds

from mpi_replica.collectives.outputs import bounds_of

DTYPES = ["?", "i1", "f2", "f4", ">f8", "g", "c16", "U3", "S5", "M8[s]", "V3", "O"]
DTYPES += [ml_dtypes.bfloat16, [("a", "f4"), ("b", "i2")]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_bounds_of_any_view_are_those_that_numpy_tells(dtype, data):
    array = np.zeros(data.draw(hnp.array_shapes(min_dims=0, max_side=4, min_side=0)), dtype)
    view = array[data.draw(hnp.basic_indices(array.shape, allow_ellipsis=True))]
    view = np.asarray(view).T if data.draw(st.booleans()) else np.asarray(view)
    if data.draw(st.booleans()):
        view.flags.writeable = False
    if view.size:
        assert bounds_of(view) == byte_bounds(view)


def test_bounds_hold_no_memory():
    array = np.zeros(10)
    bounds_of(array)
    array.resize(20)  # refused where somebody looks into it
