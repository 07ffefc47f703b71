"""Options that are wrong are told when they are made, with what would be right."""

from fractions import Fraction

import numpy as np
import pytest

import mpi_replica as mr


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"timeout_seconds": "1"}, TypeError, "timeout_seconds must be a positive number or None"),
        ({"timeout_seconds": np.array([1.0, 2.0])}, TypeError, "must be a positive number or None"),
        ({"timeout_seconds": True}, TypeError, "must be a positive number or None, got True"),
        ({"timeout_seconds": 0}, ValueError, "timeout_seconds must be a positive number or None"),
        ({"timeout_seconds": float("nan")}, ValueError, "must be a positive number or None"),
        ({"timeout_seconds": 10**400}, ValueError, "timeout_seconds is larger than any float"),
        ({"bytes_per_pack": -1}, ValueError, "bytes_per_pack must be at least 0, got -1"),
        ({"bytes_per_pack": 1.5}, TypeError, "bytes_per_pack must be an integer, got 1.5"),
        ({"name": 3}, TypeError, "name must be a string or None, got 3"),
        ({"implementation": "RING"}, ValueError, "Use one of AUTO"),
        ({"reproducible": 1}, TypeError, "reproducible must be True, False or None, got 1"),
    ],
)
def test_a_wrong_option_says_what_it_must_be(options, kind, text):
    with pytest.raises(kind, match=text):
        mr.CommunicationOptions(**options)


def test_seconds_of_any_kind_of_number_become_a_float_that_errors_can_tell():
    for seconds in (2, Fraction(2), np.float32(2)):
        options = mr.CommunicationOptions(timeout_seconds=seconds)
        assert (type(options.timeout_seconds), options.timeout_seconds) == (float, 2.0)


def test_numbers_of_numpy_are_options():
    options = mr.CommunicationOptions(timeout_seconds=np.float32(2), bytes_per_pack=np.int64(8))
    assert (options.timeout_seconds, options.bytes_per_pack) == (2, 8)


def test_implementations_of_tensorflow_say_what_stands_for_them():
    for name in ("NCCL", "RING"):
        with pytest.raises(AttributeError, match=f"{name}, which is TensorFlow's.* Use AUTO"):
            getattr(mr.CommunicationImplementation, name)
    with pytest.raises(AttributeError, match="CommunicationImplementation has no NONE"):
        mr.CommunicationImplementation.NONE  # noqa: B018


def test_a_strategy_of_tensorflow_says_which_one_is_here():
    with pytest.raises(AttributeError, match="'MirroredStrategy': its one strategy is MPIStrategy"):
        mr.MirroredStrategy  # noqa: B018
