"""Programs in which a library is imported half, or only seems to be."""

import importlib.util
import subprocess
import sys

import pytest

from launching import rank_environment

pytestmark = pytest.mark.mpi_skip  # it starts processes itself

# What looks at leaves on the ways of all calls, for two replicas of one rank.
CALLS = """
import numpy as np
import mpi_replica as mr

strategy = mr.MPIStrategy(num_replicas=2)

def step():
    ctx = mr.get_replica_context()
    mine = ctx.replica_id_in_sync_group + 1
    out = np.zeros(2)
    ctx.all_reduce("SUM", np.full(2, float(mine)), out=out)
    total = ctx.all_reduce("SUM", (np.full(2, 1.0 * mine), {"b": 1j * mine}))
    rows = ctx.all_gather([np.full((1, 2), mine)], axis=0)[0]
    merged = ctx.merge_call(lambda s, x, y: y["a"].values, args=([mine], {"a": 1j * mine}))
    return [*out, *total[0], total[1]["b"], rows.shape, merged]

def check():
    found = strategy.experimental_local_results(strategy.run(step))
    assert found == ([3.0, 3.0, 3.0, 3.0, 3j, (2, 2), (1j, 2j)],) * 2, found
    assert strategy.reduce("SUM", strategy.run(lambda: {"x": [1j]}), axis=None) == {"x": [2j]}
"""

# The real import, held where the library has some of its names, by a finder that is asked first.
HELD = """
import sys, threading

class Holder:
    def find_spec(self, name, path=None, target=None):
        if name == {submodule!r}:
            is_halfway.set()
            goes_on.wait()

is_halfway, goes_on = threading.Event(), threading.Event()
sys.meta_path.insert(0, Holder())
loader = threading.Thread(target=lambda: __import__({library!r}))
loader.start()
is_halfway.wait()
try:
    assert {library!r} in sys.modules and loader.is_alive()
    check()
finally:
    goes_on.set()
    loader.join()
"""

AFTERWARDS = """
import {library}
array = {library}.{numpy}asarray([1.0, 2.0])
total = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", array))
assert all(type(one) is type(array) for one in strategy.experimental_local_results(total))
check()
"""


def passes(program, folder=None):
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=rank_environment(120),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("library", ["torch", "jax", "cupy"])
def test_a_folder_with_the_name_of_a_library_changes_no_call(library, tmp_path):
    if importlib.util.find_spec(library):
        pytest.skip(f"{library} is installed: it is imported in place of the folder")
    (tmp_path / library).mkdir()
    passes(f"{CALLS}\nimport {library}\nassert {library}.__file__ is None\ncheck()", tmp_path)


@pytest.mark.parametrize(
    ("library", "submodule", "numpy"),
    [
        ("torch", "torch._C", ""),
        ("torch", "torch._tensor", ""),
        ("torch", "torch.masked", ""),
        ("jax", "jax._src.core", "numpy."),
        ("jax", "jax.numpy", "numpy."),
        ("jax", "jax.tree_util", "numpy."),
    ],
)
def test_calls_do_as_ever_while_another_thread_imports(library, submodule, numpy):
    """Where it has none of its names yet; and where it lacks a few, but has its class of arrays."""
    pytest.importorskip(library, reason=f"{library} is not installed")
    held = HELD.format(library=library, submodule=submodule)
    passes(CALLS + held + AFTERWARDS.format(library=library, numpy=numpy))
