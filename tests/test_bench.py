"""scripts/bench.py: that it measures and tells what is wrong, not what it finds."""

import re
import subprocess
import sys

import pytest

from benchmarks.launching import Launch, start
from benchmarks.tables import Row, table
from launching import LIBRARIES, ROOT, find_interpreter, rank_environment
from mistakes import MISTAKES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

QUANTITY = r"[\d.]+ (?:s|ms|µs|%)"


def rows_of_a_quick_run(name, library):
    """Return the lines of a table by what stands first in them."""
    python = find_interpreter(library)
    env = {"MPI_REPLICA_TEST_MPICH": python if library == "mpich" else None}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench.py", name, "--quick", "--mpi", library],
        env=rank_environment(timeout_seconds=60, additions=env),
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    title, facts, _, heading, *lines = done.stdout.splitlines()
    assert title.startswith(f"{name}: ")
    assert {"openmpi": "Open MPI", "mpich": "MPICH"}[library] in facts
    assert heading.split()[:2] == ["ranks", "median"]
    return {re.split(" {2,}", line)[0]: line for line in lines if line}


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_agreement_costs_is_told_beside_raw_collectives(library):
    rows = rows_of_a_quick_run("agreement", library)
    assert re.search(
        rf"{QUANTITY} +persistent Allgather, 256 B +{QUANTITY}", rows["agreement alone"]
    )
    for size in ("1 value", "1 kB", "64 kB", "1 MB"):
        beside = rf"{QUANTITY} +Allreduce +{QUANTITY}"
        assert re.search(beside, rows[f"ctx.all_reduce of {size}"])
        agreed = rows[f"agreement + Allreduce of {size}"]
        assert re.search(beside, agreed)
        goal = "1.010 x" if size == "1 MB" else "+3 µs" if library == "openmpi" else None
        assert re.search(r" (?:ok|over)$", agreed) if goal else agreed.endswith(("µs", "ms"))
        assert goal is None or goal in agreed
    assert re.search(rf"not watched +{QUANTITY}", rows["ctx.all_reduce of 1 value, watched"])
    waits = [row for name, row in rows.items() if name.startswith("a core, of a rank that waits")]
    assert len(waits) == 2
    assert all(re.search(r"[\d.]+ %  +5 %  (?:ok|over)$", row) for row in waits)


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_mistake_has_a_row_with_the_time_to_its_error(library):
    rows = rows_of_a_quick_run("misuse", library)
    for name in [*(mistake.name for mistake in MISTAKES), "the script returns"]:
        assert re.search(rf"2 x [12], replica \d +{QUANTITY} .* {QUANTITY}  +2 s  ", rows[name])


def test_a_goal_is_for_what_is_compared_or_else_for_the_value():
    assert Row("a", "2", 5e-6, goal=4e-6).is_over
    assert not Row("a", "2", 5e-6, goal=4e-6, comparison="difference", compared=3e-6).is_over
    assert not Row("a", "2", 5e-6).is_over


def test_a_table_aligns_its_columns_and_leaves_out_those_that_are_empty():
    rows = [
        Row("fast", "2", 1.5e-6, comparison="ratio", compared=1.01, goal=1.02),
        Row("slow and long", "4", 0.25, comparison="ratio", compared=12, goal=1.02),
        Row("wrong", "4", 3, problem="rank 1: no error was raised"),
    ]
    expected = """
               ranks  median  against it     goal
fast               2  1.5 µs     1.010 x  1.020 x  ok
slow and long      4  250 ms        12 x  1.020 x  over
wrong              4     3 s                       WRONG: rank 1: no error was raised"""
    assert table(rows) == expected.removeprefix("\n")


def test_a_launch_tells_how_it_went_wrong(monkeypatch):
    for name, value in rank_environment(timeout_seconds=30).items():
        monkeypatch.setenv(name, value)
    outcome = start(find_interpreter("openmpi"), "misuse", Launch("no_such_part", 2))
    assert outcome.status != 0
    assert outcome.records == []
    assert "no_such_part" in outcome.output
