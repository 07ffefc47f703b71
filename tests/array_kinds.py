"""The array libraries that tests meet, where they are installed."""

import numpy as np
import pytest

from on_a_device import DEVICE

LIBRARIES = ["torch", "jax", "array_api_strict", *(["cupy"] if DEVICE == "cuda" else [])]


class Library:
    """One of the libraries: how its arrays are made and known."""

    def __init__(self, name):
        self.name = name
        self.module = pytest.importorskip(name, reason=f"{name} is not installed")
        self.numpy_like = self.module.numpy if name == "jax" else self.module
        self.type = type(self.array([0]))
        if name != "torch":
            self.type = self.module.Array if name == "jax" else self.type

    def array(self, values, dtype=np.float32):
        values = np.array(values, dtype)
        if self.name == "torch":
            return self.module.as_tensor(values)
        return self.numpy_like.asarray(values)

    def holds(self, found, expected):
        """Check that `found` is an array of this library with these values."""
        assert isinstance(found, self.type), type(found)
        expected = np.asarray(expected)
        assert tuple(found.shape) == expected.shape
        np.testing.assert_array_equal(self.as_numpy(found), expected)

    def as_numpy(self, array):
        return array.get() if self.name == "cupy" else np.asarray(array)

    def as_bfloat16(self, array):
        if self.name in ("array_api_strict", "cupy"):
            pytest.skip("the array API has no bfloat16")
        pytest.importorskip("ml_dtypes", reason="numpy knows bfloat16 by it")
        bfloat16 = self.numpy_like.bfloat16
        return array.to(bfloat16) if self.name == "torch" else array.astype(bfloat16)

    def as_float32(self, array):
        return np.asarray(
            array.to(self.module.float32) if self.name == "torch" else array.astype("float32")
        )

    def needs_writable_arrays(self):
        if self.name == "jax":
            pytest.skip("arrays of jax can't be written")
