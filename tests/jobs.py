"""Programs that end badly on several ranks: how a test runs them, and what they told."""

import re
import textwrap

import pytest

from launching import ROOT, run_ranks

LIMIT_SECONDS = 60

HEAD = """
    import os, signal, sys
    import numpy as np
    import mpi_replica as mr
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.rank

    def tell(text):  # not on stdout: a launcher that aborts a job may lose what it holds
        with open(os.path.join(os.path.dirname(__file__), f"told-{rank}"), "a") as file:
            print(f"[{rank}] {text}", file=file)

    def total():
        return mr.get_replica_context().all_reduce("SUM", 1.0)

    def check(strategy):
        found = set(strategy.experimental_local_results(strategy.run(total)))
        assert found == {strategy.num_replicas_in_sync}
"""


def run_job(library, folder, program, ranks=2, *, succeeds=False, **settings):
    """Run a program on some ranks, and return what came of it.

    Parameters
    ----------
    library : {'openmpi', 'mpich'}
    folder : path
        Where the program and what its ranks tell are written.
    program : str
        What follows `HEAD`.
    ranks : int
        Number of ranks.
    succeeds : bool, optional
        Whether the launcher must report success; None where it may report anything.
    **settings
        For `run_ranks`.

    Returns
    -------
    subprocess.CompletedProcess
        With ``told``: what each rank that told anything wrote.
    """
    file = folder / "train.py"
    file.write_text(textwrap.dedent(HEAD) + textwrap.dedent(program))
    done = run_to_its_end(library, ranks, [file], succeeds=succeeds, **settings)
    done.told = [file.read_text() for file in sorted(folder.glob("told-*"))]
    return done


def run_to_its_end(library, ranks, arguments, *, succeeds, env=None, **settings):
    """Call `run_ranks`; fail the test where the job did not end by itself, or not as expected."""
    settings = {"timeout_seconds": LIMIT_SECONDS} | settings
    environment = {"PYTHONPATH": str(ROOT)} | (env or {})
    done = run_ranks(library, ranks, arguments, env=environment, **settings)
    if re.search("MPIEXEC_TIMEOUT|timeout after|time ?limit", done.stderr, re.IGNORECASE):
        pytest.fail(f"the job did not end by itself\n{done.stdout}\n{done.stderr}")
    if succeeds is not None and (done.returncode == 0) != succeeds:
        pytest.fail(f"status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def told(done):
    """Return the lines that the ranks told, in the order of the ranks."""
    return "".join(done.told).splitlines()


def tracebacks(done):
    """Return how many tracebacks were printed."""
    return done.stderr.count("Traceback (most recent call last)")
