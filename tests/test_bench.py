"""scripts/bench.py: that it measures and tells what is wrong, not what it finds."""

import dataclasses
import json
import math
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import benchmarks
from benchmarks import nests, scale
from benchmarks.by_hand import CONTRACTS, expert_ways, naive_way
from benchmarks.launching import Launch, start
from benchmarks.measuring import fastest
from benchmarks.memory import peak_bytes, resident_bytes
from benchmarks.network_model import NETWORKS, Network, seconds
from benchmarks.plotting import series
from benchmarks.tables import Beside, Row, quantity, table
from hosts.network import joined_hosts
from launching import (
    INTERPRETERS,
    LIBRARIES,
    ROOT,
    find_interpreter,
    rank_environment,
    room_for,
)
from mistakes import MISTAKES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

# What is measured is the same with each library: some tables with both, most with the first.

QUANTITY = r"[\d.]+ (?:s|ms|µs|%)"


def quick_run(library, *arguments, additions=None):
    """Return what scripts/bench.py prints in a trial with one library."""
    python = find_interpreter(library)
    env = {"MPI_REPLICA_TEST_MPICH": python if library == "mpich" else None} | (additions or {})
    command = [sys.executable, ROOT / "scripts" / "bench.py", "--quick", "--mpi", library]
    with room_for(ranks=2):  # a trial has no more
        done = subprocess.run(
            [*command, *arguments],
            env=rank_environment(timeout_seconds=300, additions=env),
            capture_output=True,
            text=True,
            timeout=295,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


def rows_of_a_quick_run(name, library):
    """Return the lines of a table by what stands first in them."""
    title, facts, _, heading, *lines = quick_run(library, name).splitlines()
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


@pytest.mark.parametrize("library", LIBRARIES[:1])
def test_each_mistake_has_a_row_with_the_time_to_its_error(library):
    rows = rows_of_a_quick_run("misuse", library)
    for name in [*(mistake.name for mistake in MISTAKES), "the script returns"]:
        assert re.search(rf"2 x [12], replica \d +{QUANTITY} .* {QUANTITY}  +2 s  ", rows[name])


@pytest.mark.parametrize("library", LIBRARIES[-1:])
def test_this_runtime_stands_beside_other_ways_from_the_same_run(library, tmp_path):
    kept, plot = tmp_path / "rows.json", tmp_path / "sizes.png"
    printed = quick_run(library, "calls", "all_reduce", "--json", kept, "--plot", plot)
    tables = {each["name"]: each for each in json.loads(kept.read_text())["tables"]}
    assert list(tables) == ["calls", "all_reduce", "sizes"]
    for each in tables.values():
        assert each["library"] == library
        assert f"{each['title']}\n{each['facts']}\n\n" in printed
        for row in each["rows"]:
            assert f"\n{row['what']}  " in printed
            assert row["besides"]
            for side in (row, *row["besides"]):
                low, high = side["spread"]
                assert 0 < low <= side["value"] <= high
    contracts = [row["what"].rpartition(", ")[2] for row in tables["all_reduce"]["rows"]]
    assert contracts == list(CONTRACTS) * 4
    for row in tables["all_reduce"]["rows"] + tables["sizes"]["rows"]:
        kinds = [re.split("[,:]", side["name"])[0] for side in row["besides"]]
        assert [kind for kind in kinds if kind != "gloo"] == ["by hand", "naive", "memcpy"]
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("library", LIBRARIES[:1])
def test_reproducible_sums_stand_beside_default_ones_in_each_layout(library, tmp_path):
    kept = tmp_path / "rows.json"
    quick_run(library, "reproducible", "--json", kept)
    (found,) = json.loads(kept.read_text())["tables"]
    timed = [row for row in found["rows"] if row["unit"] == "s"]
    assert [row["besides"][0]["name"] for row in timed] == ["default"] * len(timed)
    goals = {(row["ranks"], row["what"]): row["besides"][0]["goal"] for row in timed}
    # The ranks that host three and two replicas of five have two partial sums each.
    for ranks, most in {"2": 1.1, "3 on 2": 1.1, "5 on 2": 2.2}.items():
        assert goals[ranks, "4 kB of float32, fresh, AUTO"] == 1.3
        assert goals[ranks, "1 MB of float32, fresh, AUTO"] == most
        assert goals[ranks, "1 MB of float32, fresh, ALLTOALL"] is None
    taken = [row for row in found["rows"] if row["unit"] == "B"]
    ways = [(row["what"].rpartition(", ")[2], row["goal"]) for row in taken]
    assert ways == [("default", None), ("AUTO", 32e6), ("ALLTOALL", 32e6)] * 2


@pytest.mark.parametrize("library", LIBRARIES[:1])
def test_training_stands_beside_that_of_torch_alone_and_where_a_core_is_busy(library, tmp_path):
    """And both come to the same weights, or there would be no row."""
    python, kept = find_interpreter(library, arrays=True), tmp_path / "rows.json"
    variable, _ = INTERPRETERS[library, True]
    quick_run(library, "gradients", "--json", kept, additions={variable: python})
    (found,) = json.loads(kept.read_text())["tables"]
    sides = {row["what"]: row["besides"] for row in found["rows"]}
    goals = {
        (re.split(", [0-9.]+ .?B", what)[0], "busy" in what): (side["name"], side["goal"])
        for what, (side, *_) in sides.items()
        if what.startswith("a step")
    }
    torch = "DistributedDataParallel"
    assert goals == {
        ("a step of a perceptron", False): (torch, 0.6),
        ("a step of a perceptron", True): (torch, 1.0),
        ("a step of ResNet-18", False): (torch, 0.9),
        ("a step of ResNet-18", True): (torch, 1.0),
    }
    names = [(what.split(",")[0], [side["name"] for side in row]) for what, row in sides.items()]
    assert names[:8] == [
        *[("there and back", ["two of numpy's arrays", "a function by hand"])] * 3,
        *[("100 tensors of 256 B", ["numpy's arrays"])] * 2,
        *[("compiled by JAX", ["io_callback, and numpy's array"])] * 3,
    ]
    every = [side for row in sides.values() for side in row]
    ratios = [side["compared"] for side in every if side["comparison"] == "ratio"]
    assert len(ratios) == 12
    assert min(ratios) > 0


@pytest.mark.parametrize("library", LIBRARIES[-1:])
def test_broadcasts_and_input_stand_beside_what_gives_the_same_by_hand(library, tmp_path):
    """Or there would be no row."""
    kept = tmp_path / "rows.json"
    quick_run(library, "broadcast", "datasets", "--json", kept)
    broadcasts, datasets = json.loads(kept.read_text())["tables"]
    assert [row["what"] for row in broadcasts["rows"]] == [
        f"{call} of {size}"
        for size in ("1 kB", "64 kB", "1 MB")
        for call in ("extended.broadcast_to", "variable.assign")
    ]
    for row in broadcasts["rows"]:
        by_hand, naive = row["besides"]
        assert by_hand["name"].startswith("by hand, ")
        assert naive["name"] == "naive: bcast"
    for row in datasets["rows"]:
        (side,) = row["besides"]
        assert side["name"] == "a loop"
        assert side["value"] > 0


@pytest.mark.parametrize("library", LIBRARIES[:1])
def test_checkpoints_stand_beside_those_by_hand_and_leave_no_files(library, tmp_path):
    folder, kept = Path(os.environ.get("TMPDIR", ROOT)), tmp_path / "rows.json"
    before = set(folder.glob(".bench-*"))
    quick_run(library, "checkpoint", "--json", kept)
    assert set(folder.glob(".bench-*")) <= before
    (found,) = json.loads(kept.read_text())["tables"]
    timed = [row for row in found["rows"] if row["unit"] == "s"]
    taken = [row for row in found["rows"] if row["unit"] == "B"]
    assert [row["what"].split()[0] for row in timed] == ["save", "restore"] * 3
    for row in timed:
        (side,) = row["besides"]
        assert side["name"].startswith("by hand")
        assert side["goal"] == 1.25
    assert [row["what"].split()[:2] for row in taken] == [
        ["memory:", "save"],
        ["memory:", "restore"],
    ] * 3
    assert {row["goal"] for row in taken} == {64e6}


@pytest.mark.parametrize("library", LIBRARIES)
def test_reductions_between_hosts_stand_beside_the_calls_of_the_library(library, tmp_path):
    with joined_hosts():  # or a skip, where the machine does not let us
        pass
    kept = tmp_path / "rows.json"
    quick_run(library, "hosts", "--json", kept)
    (found,) = json.loads(kept.read_text())["tables"]
    ways = {row["what"]: [side["name"] for side in row["besides"]] for row in found["rows"]}
    calls = ["Allreduce", "Iallreduce, polled"]
    assert ways == {
        "ctx.all_reduce of 1 value": [*calls, "ctx.all_reduce of 1 rank, Allreduce"],
        "ctx.all_reduce of 64 kB": calls,
    }
    for row in found["rows"]:
        assert row["ranks"] == "2 x 1"
        assert [side["goal"] for side in row["besides"][:2]] == [1, None]
        assert all(side["compared"] > 0 for side in row["besides"])


def test_where_hosts_can_not_be_made_that_is_said(tmp_path):
    """And nothing is printed that looks like a table."""
    command = [sys.executable, ROOT / "scripts" / "bench.py", "hosts", "--quick", "--mpi"]
    env = rank_environment(30, {"PATH": str(tmp_path)})
    done = subprocess.run(
        [*command, "openmpi"], env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("hosts: hosts need ip, tc, unshare, nsenter, setpriv, of iprou")


@pytest.mark.parametrize("name", [["--plot", "sizes"], ["no_such_table"], []])
def test_what_cannot_be_measured_is_refused(name):
    command = [sys.executable, ROOT / "scripts" / "bench.py", *name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "error: " in done.stderr


def test_all_is_every_table_of_costs_that_anybody_may_measure():
    assert set(benchmarks.NAMES) - set(benchmarks.ALL) == {"hosts", "misuse"}
    folder = ROOT / "scripts" / "benchmarks"
    for name in benchmarks.NAMES:
        first = (folder / f"{name}.py").read_text().splitlines()[0]
        assert first.startswith(f'"""{name}: ')


def test_a_goal_is_for_what_is_compared_or_else_for_the_value():
    assert Row("a", "2", 5e-6, goal=4e-6).is_over
    assert not Row("a", "2", 5e-6).is_over
    assert Beside("b", 3, goal=2).is_over
    assert not Beside("b", 3, None, "difference", 1, goal=2).is_over
    assert Row("a", "2", 5e-6, goal=6e-6, besides=(Beside("b", 3, goal=2),)).is_over


def test_a_row_comes_back_from_its_record():
    row = Row("a", "2", 5e-6, (4e-6, 6e-6), besides=(Beside("b", 3e-6, (2e-6, 4e-6), goal=2),))
    assert Row.of_record(json.loads(json.dumps(dataclasses.asdict(row)))).lines() == row.lines()


def test_a_table_aligns_its_columns_and_leaves_out_those_that_are_empty():
    ours = Beside("by hand", 1.4e-6, None, "ratio", 1.01, goal=1.02)
    rows = [
        Row("fast", "2", 1.5e-6, goal=8e-6, besides=(ours, Beside("memcpy", 1e-7))),
        Row("slow and long", "4", 0.25, besides=(Beside("by hand", 0.02, None, "ratio", 12),)),
        Row("wrong", "4", 3, problem="on rank 1"),
    ]
    expected = """
               ranks  median  beside   median  against it     goal
fast               2  1.5 µs                                  8 µs  ok
                              by hand  1.4 µs     1.010 x  1.020 x  ok
                              memcpy   0.1 µs
slow and long      4  250 ms  by hand   20 ms        12 x
wrong              4     3 s                                        WRONG: on rank 1"""
    assert table(rows) == expected.removeprefix("\n")


QUANTITIES = [
    *((1.234e-6, "s", "1.23 µs"), (0, "s", "0 µs"), (250e-3, "s", "250 ms"), (61, "s", "61 s")),
    *((1.02e8, "B", "102 MB"), (-5e4, "B", "-50 kB"), (256, "B", "256 B")),
    *((0.05, "%", "5 %"), (3, "", "3"), (1.5, "", "1.5")),
]


@pytest.mark.parametrize(("number", "unit", "text"), QUANTITIES)
def test_quantities_have_three_digits_and_a_unit(number, unit, text):
    assert quantity(number, unit) == text


def test_the_fastest_side_is_that_of_the_least_median():
    taken = np.array([[3, 1, 3], [2, 2, 9], [4, 4, 1]])
    assert fastest(["a", "b", "c"], taken) == ["b", "a", "c"]


def test_the_plot_has_a_line_for_each_side_whatever_was_best_by_hand():
    rows = [
        Row("a", "2", 1.0, (1, 2), size_bytes=4, besides=(Beside("by hand, 1 MiB", 2.0, (1, 3)),)),
        Row("b", "2", 3.0, (3, 4), size_bytes=8, besides=(Beside("by hand, 2 MiB", 4.0, (4, 5)),)),
    ]
    assert series(rows) == {
        "this runtime": [(4, 1.0, (1, 2)), (8, 3.0, (3, 4))],
        "by hand": [(4, 2.0, (1, 3)), (8, 4.0, (4, 5))],
    }


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_memory_that_was_given_back_shows_in_the_peak():
    before = resident_bytes()
    # Not by malloc, which may have so much that is free, after other tests.
    with mmap.mmap(-1, 80_000_000, mmap.MAP_PRIVATE) as memory:
        np.frombuffer(memory)[:] = 1
    assert 75e6 < peak_bytes() - before < 90e6  # the kernel counts roughly
    assert peak_bytes() - resident_bytes() > 70e6
    assert peak_bytes() - resident_bytes() < 10e6


def test_to_import_tables_does_not_start_mpi():
    """The process that starts the launcher must not be one of MPI's."""
    names = [name for name in benchmarks.NAMES if name != "gradients"]  # which needs torch
    imports = "; ".join(f"import benchmarks.{name}" for name in [*names, "plotting"])
    code = f"{imports}; import sys; assert 'mpi4py.MPI' not in sys.modules"
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "scripts", ROOT / "tests")))
    command = [sys.executable, "-c", code]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": folders}, check=True)


NETWORK = Network("slow", latency_seconds=1.0, bandwidth=10.0, source="nobody")


@pytest.mark.parametrize(
    ("operation", "sent_bytes", "ranks", "expected"),
    [
        ("Barrier", 0, 8, 3),
        ("Allreduce", 0, 5, 3),
        ("Allreduce", 10, 8, 3 + 3),  # recursive doubling
        ("Allreduce", 80, 8, 6 + 14),  # Rabenseifner's: twice 7 / 8 of the bytes
        ("Allgather", 10, 8, 3 + 7),
        ("Alltoallv", 80, 8, 7 + 7),
    ],
)
def test_a_network_takes_latencies_and_bytes_of_the_best_algorithm(
    operation, sent_bytes, ranks, expected
):
    assert seconds(NETWORK, operation, sent_bytes, ranks) == pytest.approx(expected)


def test_a_call_takes_on_a_network_what_its_mpi_calls_take_and_what_was_measured():
    record = {"call": "run", "ranks": 8, "seconds": 0.5, "sent": [("Allreduce", 2, 20)]}
    ours, alone = scale.modelled(record, NETWORK)
    assert ours == pytest.approx(0.5 + 2 * (3 + 3))
    assert alone == pytest.approx(3)


def test_what_calls_take_on_many_ranks_is_counted_and_modelled(tmp_path):
    kept, plot = tmp_path / "rows.json", tmp_path / "scale.png"
    quick_run("openmpi", "scale", "--json", kept, "--plot", plot, "--ranks", "2")
    (found,) = json.loads(kept.read_text())["tables"]
    rows = {(row["what"], row["ranks"]): row for row in found["rows"]}
    for call in scale.CALLS:
        on_few = rows[f"MPI calls of {call}, by headers", "2-2"]
        assert 1 <= on_few["value"] <= 4
        assert rows[f"bytes of {call}, by words", "64-256"]["value"] >= 24
        assert rows[f"Python of {call}", "256"]["value"] > 0
        for network in NETWORKS:
            ours = rows[f"{call}, {network.name}", "256"]
            (alone,) = ours["besides"]
            assert 0 < alone["value"] < ours["value"]
    # An agreement that does not grow, and the sum itself.
    assert rows["bytes of all_reduce of 1 kB, by words", "64-256"]["value"] == 24 + 1024
    assert rows["MPIStrategy()", "2"]["besides"][0]["name"] == "COMM_WORLD.Dup()"
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")


def test_resnet50_has_the_parameters_of_the_paper():
    shapes = nests.leaves_of(nests.resnet50())
    assert (len(shapes), sum(map(math.prod, shapes))) == (161, 25_557_032)


class EqualRanks:
    """Two ranks that hold the same, as the ways by hand see them."""

    def __init__(self):
        self.comm = self.mpi = self
        self.SUM, self.IN_PLACE = "sum", "in place"

    def Allreduce(self, send, receive, op):
        receive[...] = 2 * (receive if send is self.IN_PLACE else send)


SHAPES = {"one value": [(1,)], "large": [(300, 1000)]}
SHAPES["of all sizes"] = [(5,), (17_000,), (2, 3), (90_000,), (), (16_000,)]


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_all_ways_by_hand_give_the_sums(contract, shapes):
    world, arrays = EqualRanks(), nests.arrays_of(shapes)
    for way in range(len(expert_ways(world, contract, arrays, arrays)) + 1):
        leaves = nests.contribution(arrays, rank=0)
        expected = [2 * leaf for leaf in leaves]
        given = {"fresh": None, "kept": nests.arrays_of(shapes), "in place": leaves}[contract]
        ways = list(expert_ways(world, contract, leaves, given).values())
        ways.append(naive_way(world, contract, leaves, given)[1])
        assert nests.are_equal(ways[way](), expected)


def test_a_launch_tells_how_it_went_wrong(monkeypatch):
    for name, value in rank_environment(timeout_seconds=30).items():
        monkeypatch.setenv(name, value)
    outcome = start("openmpi", find_interpreter("openmpi"), "misuse", Launch("no_such_part", 2))
    assert outcome.status != 0
    assert outcome.records == []
    assert "no_such_part" in outcome.output


@pytest.mark.parametrize("library", LIBRARIES)
def test_two_checkouts_are_measured_in_turn(library):
    python = find_interpreter(library)
    command = [sys.executable, ROOT / "scripts" / "compare.py", ROOT, ROOT, "--mpi", library]
    with room_for(ranks=4):
        done = subprocess.run(
            [*command, "--rounds", "3", "--only", "of 1 kB"],
            env=rank_environment(60, {"MPI_REPLICA_TEST_MPICH": python}),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[1:]
    assert len(lines) >= 4
    for line in lines:
        assert re.search(r"of 1 kB.* +[\d.]+ +[\d.]+ µs +[\d.]+ +[\d.]+-[\d.]+$", line), line


def test_a_folder_that_is_no_checkout_is_not_measured(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "compare.py", tmp_path, ROOT, "--ranks", "1"]
    done = subprocess.run(
        command, env=rank_environment(60), capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert f"{tmp_path} was to be measured" in done.stderr
