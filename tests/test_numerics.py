"""What the bits of results depend on is compared between the ranks of reproducible strategies."""

import os
import re

import numpy as np
import pytest

from jobs import run_to_its_end
from launching import LIBRARIES
from mpi_replica.ranks.numerics import Numerics, compare, differences, numerics_here

ONE = Numerics(
    blas_threads=1,
    machine="x86_64",
    c_library="glibc 2.36",
    numpy="2.4.6",
    cpu_features=("SSE2", "AVX2", "AVX512F", "AVX512_SKX"),
    blas=("OpenBLAS 0.3.30 SkylakeX pthreads",),
)
SCIPYS = "OpenBLAS 0.3.28 SkylakeX pthreads"
HASWELL = "OpenBLAS 0.3.30 Haswell pthreads"


def test_ranks_that_are_alike_are_not_warned_of():
    for ranks in range(4):
        assert differences([ONE] * ranks) is None


def test_this_process_is_told_as_it_is():
    found = numerics_here()
    assert (found.numpy, found.machine) == (np.__version__, os.uname().machine)
    assert found.cpu_features
    assert found == numerics_here()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"machine": "aarch64"}, "machine: ranks 0-1, 3: x86_64; rank 2: aarch64."),
        ({"c_library": ""}, "C library: ranks 0-1, 3: glibc 2.36; rank 2: unknown."),
        ({"numpy": "2.5.0"}, "numpy: ranks 0-1, 3: 2.4.6; rank 2: 2.5.0."),
        (
            {"cpu_features": ONE.cpu_features[:2]},
            "numpy's CPU kernels: ranks 0-1, 3: AVX512F, AVX512_SKX; rank 2: without.",
        ),
        (
            {"cpu_features": (*ONE.cpu_features[:3], "AVX512_ICL")},
            "numpy's CPU kernels: ranks 0-1, 3: AVX512_SKX; rank 2: AVX512_ICL.",
        ),
        ({"blas": (HASWELL,)}, f"BLAS: ranks 0-1, 3: {ONE.blas[0]}; rank 2: {HASWELL}."),
        ({"blas": ()}, f"BLAS: ranks 0-1, 3: {ONE.blas[0]}; rank 2: unknown."),
    ],
)
def test_what_differs_is_told_with_the_ranks_that_have_it_and_nothing_else_is(change, told):
    text = differences([ONE, ONE, ONE._replace(**change), ONE])
    before, _, after = text.partition(told)
    assert after, text
    assert "will not have the same bits" in before
    assert not re.search(r"ranks? \d", before + after), text
    assert "Use the same environment" in after


def test_all_that_differs_is_told_in_one_warning():
    text = differences([ONE, ONE._replace(numpy="2.5.0"), ONE._replace(blas=(HASWELL,))])
    assert "numpy: ranks 0, 2: 2.4.6; rank 1: 2.5.0." in text
    assert f"BLAS: ranks 0-1: {ONE.blas[0]}; rank 2: {HASWELL}." in text


def test_a_library_that_some_ranks_have_loaded_beside_the_others_is_no_difference():
    """Rank 0 draws, say, with what has a BLAS library of its own."""
    more = ONE._replace(blas=(SCIPYS, *ONE.blas))
    assert differences([more, ONE, ONE]) is None
    assert differences([ONE, ONE._replace(blas=(SCIPYS,))]) is not None
    assert differences([more, ONE._replace(blas=(HASWELL,))]) is not None


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        ({"numpy": "2.5.0"}, []),  # another environment: kernels do not help
        ({"machine": "aarch64", "cpu_features": ("NEON",), "blas": (HASWELL,)}, []),
        ({"blas": (HASWELL,)}, ["OPENBLAS_CORETYPE=..."]),
        (
            {"cpu_features": ONE.cpu_features[:2], "blas": (HASWELL, "MKL 2025.2 intel")},
            [
                "OPENBLAS_CORETYPE=...",
                "MKL_CBWR=COMPATIBLE",
                "NPY_DISABLE_CPU_FEATURES='AVX512F AVX512_SKX'",
            ],
        ),
    ],
)
def test_the_settings_that_help_are_named(change, settings):
    text = differences([ONE, ONE._replace(**change)])
    assert re.findall(r"\w+=(?:'[^']*'|[.\w]+\b|\.\.\.)", text) == settings, text


@pytest.mark.parametrize("rank", range(3))
def test_numbers_of_threads_that_differ_are_an_error_on_every_rank(rank):
    facts = [ONE, ONE._replace(blas_threads=2), ONE]
    with pytest.raises(ValueError, match="differs between ranks: ranks 0, 2: 1; rank 1: 2"):
        compare(facts, rank)


def test_rank_0_alone_warns(caplog):
    facts = [ONE, ONE._replace(numpy="2.5.0")]
    compare(facts, 1)
    assert caplog.records == []
    compare(facts, 0)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("mpi_replica", "WARNING")
    assert record.getMessage() == differences(facts)


# The kernels are chosen when numpy is imported.
PROGRAM = """
import os, sys
from mpi4py import MPI

if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
    os.environ.update(setting.split("=", 1) for setting in sys.argv[1:])
import mpi_replica as mr

options = mr.CommunicationOptions(reproducible=True)
with mr.MPIStrategy(communication_options=options) as strategy:
    step = lambda: mr.get_replica_context().all_reduce("SUM", 1.0)
    assert strategy.run(step).values == (MPI.COMM_WORLD.size,)
mr.MPIStrategy().close()
"""


def warnings_of(library, folder, *settings):
    """Return what is logged where the last of three ranks has these settings."""
    file = folder / "train.py"
    file.write_text(PROGRAM)
    done = run_to_its_end(library, 3, [file, *settings], succeeds=True)
    return [line for line in done.stderr.splitlines() if "compute differently" in line]


def other_kernels():
    """Return settings for other CPU kernels than this process has, and their names."""
    here = numerics_here()
    openblas = [text.split() for text in here.blas if text.startswith("OpenBLAS")]
    if here.machine != "x86_64" or not openblas or openblas[0][2] == "Nehalem":
        pytest.skip("needs OpenBLAS on an x86_64 that has more than the oldest kernels")
    feature = here.cpu_features[-1]
    core, disabled = "OPENBLAS_CORETYPE=Nehalem", f"NPY_DISABLE_CPU_FEATURES={feature}"
    return (core, disabled), openblas[0][2], feature


@pytest.mark.mpi_skip  # it starts programs that must not be ranks themselves
@pytest.mark.parametrize("library", LIBRARIES)
class TestJobs:
    def test_ranks_with_other_cpu_kernels_are_named_in_one_warning(self, library, tmp_path):
        settings, kernel, feature = other_kernels()
        (text,) = warnings_of(library, tmp_path, *settings)
        assert f"numpy's CPU kernels: ranks 0-1: {feature}; rank 2: without." in text
        assert re.search(
            rf"BLAS: ranks 0-1: OpenBLAS [\d.]+ {kernel} \w+; rank 2: OpenBLAS [\d.]+ Nehalem ",
            text,
        )
        assert f"OPENBLAS_CORETYPE=..., NPY_DISABLE_CPU_FEATURES='{feature}'" in text

    def test_ranks_with_the_same_kernels_are_not_warned_of(self, library, tmp_path):
        assert warnings_of(library, tmp_path) == []
