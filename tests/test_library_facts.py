"""What is known of MPI libraries by what they say of themselves."""

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpi_replica.ranks.library_facts import has_sound_persistent_collectives, is_intel_mpi
from mpi_replica.ranks.loaded_libraries import loaded_libraries

pytestmark = pytest.mark.mpi_skip


def saying(text):
    """Return the library that says so."""
    return SimpleNamespace(Get_library_version=lambda: text)


@pytest.mark.parametrize(
    ("text", "are_sound"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution", True),
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25", True),
        ("MPICH Version:      4.1.3\nMPICH Release date: Fri Sep 25", True),
        ("MPICH Version:      4.1.2\nMPICH Release date: Fri Sep 25", False),
        ("MPICH Version:\t4.0.2\nMPICH Release date:\tThu Apr  7", False),
        ("MPICH Version:      3.4.3", False),
        ("Intel(R) MPI Library 2021.19.0 for Linux* OS\n", False),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)", False),
    ],
)
def test_persistent_collectives_are_those_that_were_right(text, are_sound):
    assert has_sound_persistent_collectives(saying(text)) == are_sound
    assert is_intel_mpi(saying(text)) == text.startswith("Intel")


def test_files_in_memory_whose_names_are_no_text_are_no_hindrance(tmp_path):
    path = os.fsencode(tmp_path) + b"/libmpi-\xe9.so"
    with open(path, "w+b") as file:
        file.write(b"x")
        file.flush()
        with mmap.mmap(file.fileno(), 1):
            assert os.fsdecode(path) in loaded_libraries()


def test_files_of_data_are_no_libraries(tmp_path):
    path = tmp_path / "libmpi" / "libmpi_traces.bin"
    path.parent.mkdir()
    mapped = np.memmap(path, mode="w+", shape=1)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert not [name for name in loaded_libraries() if name.startswith(str(tmp_path))]
    assert mapped.tolist() == [0]
