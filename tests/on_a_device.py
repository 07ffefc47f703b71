"""The tests of torch with tensors on a GPU: ``MPI_REPLICA_TEST_DEVICE=cuda``, by hand where one is.

Tensors that a test makes without saying where are there then, and numpy's functions, by which tests
compare, get copies of them. The package never asks tensors for such copies.
"""

import os

import pytest

DEVICE = os.environ.get("MPI_REPLICA_TEST_DEVICE", "cpu")

in_memory_of_the_host = pytest.mark.skipif(
    DEVICE != "cpu", reason="it is about tensors in the memory of the host"
)


def make_tensors_there():
    import torch

    torch.set_default_device(DEVICE)
    of_host = torch.Tensor.__array__
    torch.Tensor.__array__ = lambda tensor, *args, **how: of_host(tensor.cpu(), *args, **how)
