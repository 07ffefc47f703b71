"""all_reduce of other packages, where they are installed beside this one."""

import functools
import importlib.util
import os
import tempfile
from pathlib import Path

import numpy as np

from .by_hand import FRESH, IN_PLACE

# Removed at the end of the process.
_folders = []


def gloo_way(world, contract, leaves, results):
    """Return how PyTorch's gloo does it, as a way of by_hand.py; None where it is not installed.

    Its sums are always in place: other contracts copy first. All arrays are in flight together.
    """
    distributed = torch_over_gloo(world)
    if distributed is None:
        return None
    from torch import from_numpy

    if contract == FRESH:

        def fresh():
            sums = [leaf.copy() for leaf in leaves]
            _finish([distributed.all_reduce(from_numpy(each), async_op=True) for each in sums])
            return sums

        return fresh
    tensors = [from_numpy(result) for result in results]

    def given():
        if contract != IN_PLACE:
            for leaf, result in zip(leaves, results, strict=True):
                np.copyto(result, leaf)
        _finish([distributed.all_reduce(tensor, async_op=True) for tensor in tensors])
        return results

    return given


def _finish(works):
    for work in works:
        work.wait()


@functools.cache
def torch_over_gloo(world):
    """Return torch.distributed with the ranks of `world`; None where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    # All ranks are on this host, whatever its name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    from torch import distributed

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if world.rank == 0:
        _folders.append(tempfile.TemporaryDirectory())
    folder = world.comm.bcast(_folders[0].name if world.rank == 0 else None)
    store = Path(folder) / "store"
    distributed.init_process_group(
        "gloo", init_method=store.as_uri(), rank=world.rank, world_size=world.size
    )
    return distributed
