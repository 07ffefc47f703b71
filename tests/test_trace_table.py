"""The summary of a trace: what it says of simulated jobs is what they did, on one screen."""

import json

import numpy as np
import pytest

from mpi_replica.ranks.watch.event_log import MOST_REPLICAS, SPAN_KINDS, EventKind
from mpi_replica.trace import table
from mpi_replica.trace.plot import shares
from mpi_replica.trace.summary import summary
from mpi_replica.trace.timeline import Timeline
from simulated_jobs import HOUR, MILLISECOND, SECOND, LocalClock, SimulatedProcess, World

SUM = "all_reduce(SUM, 1 leaf, 8 B) at train.py:8"
MAX = "all_reduce(MAX, 1 leaf, 8 B) at train.py:9"


def world_of(size):
    return World(
        SimulatedProcess(LocalClock(n * HOUR, 1 + (-1) ** n * 1e-5 * (n % 8)), n)
        for n in range(size)
    )


def summary_of(processes, killed=()):
    traces = [process.traced(is_killed=process in killed) for process in processes]
    return summary(Timeline(traces))


def test_the_rank_that_is_late_is_named_with_its_share_its_delay_and_its_line():
    world = world_of(3)
    late = world.members[1]
    world.call(compares=True)
    for step in range(100):
        world.call(SUM, late={late: 5 * MILLISECOND if step % 10 else 0})
        if step % 10:
            came = world.arrivals[-1][late]
            for ago in (1, 2, 3):
                late.sample("data.py:41 in load_batch", came - ago * MILLISECOND)
            late.sample("data.py:50 in shuffle", came - 4 * MILLISECOND)
        world.works(MILLISECOND)
        late.sample("train.py:20 in step", late.at)
        world.call(MAX)
    world.compare()
    found = summary_of(world.members)
    (named,) = (one for one in found["late"] if one["line"] == "train.py:8")
    assert named["rank"].startswith("rank 1 (host1, pid 1001")
    assert named["call"] == "all_reduce(SUM, 1 leaf, 8 B)"
    assert named["calls"] == 100
    assert named["share"] == pytest.approx(0.9, abs=0.05)
    assert named["seconds"] == pytest.approx(0.005, rel=0.1)
    assert list(named["meanwhile"]) == ["data.py:41 in load_batch", "data.py:50 in shuffle"]
    assert list(named["meanwhile"].values()) == pytest.approx([0.75, 0.25], abs=0.05)
    text = table.text(found)
    (line,) = (line for line in text.splitlines() if "meanwhile it is at" in line)
    assert line.startswith("rank 1 (host1, pid 1001) is last in 9")
    assert f" of 100 calls at train.py:8, {named['seconds'] * 1e3:.2f} ms in the mean" in line
    assert "75% data.py:41 in load_batch; 25% data.py:50 in shuffle." in line


def test_no_rank_is_last_in_calls_that_are_undecided():
    world = world_of(3)
    world.call(MAX, compares=True)
    for _ in range(10):
        world.call(SUM)
    world.compare()
    found = summary_of(world.members[:-1])  # nobody knows when the third rank has come
    assert [site["last"] for site in found["sites"]] == [{}, {}]
    assert "undecided" in table.text(found)


def test_calls_sizes_waits_and_moves_of_a_call_site_are_those_of_a_mean_rank():
    world = world_of(4)
    world.call(MAX, compares=True)
    for _ in range(10):
        world.call(SUM, late={world.members[3]: 100 * MILLISECOND})
    world.compare()
    found = summary_of(world.members)
    (site,) = (one for one in found["sites"] if one["line"] == "train.py:8")
    assert (site["calls"], site["bytes"]) == (10, 2560)
    assert site["waits"] == pytest.approx(10 * 0.1 * 3 / 4, rel=0.01)
    assert 0 < site["moves"] < 0.01
    assert site["bytes_per_second"] == pytest.approx(site["bytes"] / site["moves"])
    assert list(site["last"].values()) == [1.0]
    assert found["num_sites"] == 2


def test_checkpoints_of_one_line_are_one_call_site_whatever_their_paths():
    world = world_of(2)
    world.call(MAX, compares=True)
    for step in range(30):
        late = {world.members[1]: 100 * MILLISECOND}
        world.call(f"Checkpoint.save('/of at (a)/ckpt-{step}') at train.py:20", late=late)
        world.call(f"Checkpoint.restore('/its/ckpt-{step}') at train.py:30")
    world.compare()
    found = summary_of(world.members)
    calls = {(site["call"], site["line"]): site["calls"] for site in found["sites"]}
    assert calls[("Checkpoint.save", "train.py:20")] == 30
    assert calls[("Checkpoint.restore", "train.py:30")] == 30
    assert found["num_sites"] == 3
    (late,) = (late for late in found["late"] if late["line"] == "train.py:20")
    assert (late["rank"][:6], late["calls"]) == ("rank 1", 30)
    assert late["share"] == pytest.approx(1, abs=0.05)


def busy_job():
    """Return ranks that have done a bit of everything."""
    world = world_of(3)
    for _ in range(5):
        for process in world.members:
            process.span(SPAN_KINDS.index("input"), 20 * MILLISECOND)
        world.works(100 * MILLISECOND)
        world.call(SUM, late={world.members[2]: 30 * MILLISECOND}, compares=True)
        for process in world.members:
            process.span(SPAN_KINDS.index("checkpoint"), 10 * MILLISECOND)
            process.span(SPAN_KINDS.index("commit"), 5 * MILLISECOND)
            process.span(SPAN_KINDS.index("recovery"), 5 * MILLISECOND)
    return world


def test_kinds_of_time_add_up_to_the_total():
    for rank in summary_of(busy_job().members)["ranks"]:
        seconds = rank["seconds"]
        assert sum(seconds.values()) == pytest.approx(2 * seconds["total"])
        assert seconds["input"] == pytest.approx(0.1, rel=1e-3)
        assert seconds["checkpoint"] == pytest.approx(0.05, rel=1e-3)
        assert seconds["elastic"] == pytest.approx(0.05, rel=1e-3)
        assert seconds["compute"] == pytest.approx(0.5 + 0.15 * (rank["rank"] == 2), rel=0.1)


def test_a_call_within_a_part_is_a_call():
    world = world_of(2)
    world.call(compares=True)
    world.compare()
    begun = [process.at for process in world.members]
    world.call("next at train.py:4", late={world.members[1]: SECOND})
    for process, begin in zip(world.members, begun, strict=True):
        process.add(
            EventKind.SPAN, "next", -1, begin, process.at + MILLISECOND, SPAN_KINDS.index("input")
        )
    found = summary_of(world.members)
    seconds = [rank["seconds"] for rank in found["ranks"]]
    assert [one["input"] for one in seconds] == pytest.approx([0.001, 1.001], rel=0.1)
    assert [one["waits"] for one in seconds] == pytest.approx([1.0, 0.0], abs=0.001)


def test_a_part_within_a_part_counts_once():
    world = world_of(2)
    world.call(compares=True)
    for process in world.members:
        begun = process.at
        for part in ("input", "checkpoint"):
            process.span(SPAN_KINDS.index(part), SECOND)
            process.add(EventKind.SPAN, "all", -1, begun, process.at, SPAN_KINDS.index(part))
        process.add(EventKind.SPAN, "again", -1, begun, process.at, SPAN_KINDS.index("input"))
    for rank in summary_of(world.members)["ranks"]:
        seconds = rank["seconds"]
        assert sum(seconds.values()) == pytest.approx(2 * seconds["total"])
        assert seconds["checkpoint"] == pytest.approx(2, rel=1e-3)
        assert seconds["input"] == pytest.approx(0, abs=1e-3)


def test_a_part_of_a_replica_counts_as_what_it_is():
    world = world_of(2)
    world.call(compares=True)
    for process in world.members:
        begun = process.at
        process.works(SECOND)
        process.add(EventKind.SPAN, "load", 1, begun, process.at, SPAN_KINDS.index("input"))
    for rank in summary_of(world.members)["ranks"]:
        assert rank["seconds"]["input"] == pytest.approx(1, rel=1e-3)


def test_what_other_threads_than_those_that_call_do_is_no_time_of_the_rank():
    world = world_of(2)
    world.call(compares=True)
    later = world.members[1]  # whose calls come from its second thread
    later.memberships[0] = later.memberships[0]._replace(calls_track=-2)
    for process in world.members:
        begun = process.at
        process.works(4 * SECOND)
        tracks = [-1, 0, -2, MOST_REPLICAS, -3, 2 * MOST_REPLICAS]
        for length, track in enumerate(tracks, 1):
            until = begun + length * SECOND // 2
            process.add(EventKind.SPAN, "load", track, begun, until, SPAN_KINDS.index("input"))
    seconds = [rank["seconds"]["input"] for rank in summary_of(world.members)["ranks"]]
    assert seconds == pytest.approx([1, 2], rel=1e-3)


def test_what_a_checkpoint_does_is_no_communication_but_for_its_waits():
    world = world_of(2)
    world.call(compares=True)
    world.compare()
    begun = [process.at for process in world.members]
    world.call("Checkpoint.save at train.py:4", late={world.members[1]: SECOND})
    for process, begin in zip(world.members, begun, strict=True):
        process.works(SECOND)
        number = SPAN_KINDS.index("checkpoint")
        process.add(EventKind.SPAN, "save", -1, begin, process.at, number)
    seconds = [rank["seconds"] for rank in summary_of(world.members)["ranks"]]
    assert [one["checkpoint"] for one in seconds] == pytest.approx([1.0, 2.0], rel=0.01)
    assert [one["waits"] for one in seconds] == pytest.approx([1.0, 0.0], abs=0.001)
    assert [one["moves"] for one in seconds] == pytest.approx([0.0, 0.0], abs=0.01)


def test_a_step_is_said_to_take_less_without_waits():
    world = world_of(2)
    world.call(compares=True)
    for _ in range(10):
        begun = [process.at for process in world.members]
        world.works(10 * MILLISECOND)
        world.call(SUM, late={world.members[0]: 20 * MILLISECOND})
        for process, begin in zip(world.members, begun, strict=True):
            process.add(EventKind.SPAN, "run", -1, begin, process.at, SPAN_KINDS.index("run"))
            process.add(EventKind.SPAN, "run", 0, begin, process.at, SPAN_KINDS.index("run"))
    world.compare()
    found = summary_of(world.members)
    step = found["step"]
    assert step["runs"] == 10
    assert step["seconds"] == pytest.approx(0.03, rel=0.05)
    assert step["seconds_without_waits"] == pytest.approx(0.02, rel=0.1)
    assert table.text(found).endswith(
        f"takes {step['seconds'] * 1e3:.2f} ms in the mean of 10;"
        f" {step['seconds_without_waits'] * 1e3:.2f} ms if nobody waited."
    )


def test_what_is_missing_is_said():
    world = world_of(4)
    world.call(compares=True)
    traces = [process.traced(is_killed=n == 1) for n, process in enumerate(world.members)]
    traces[2].missing_ns = 1_234_567_890
    found = summary(Timeline(traces[:3]))
    assert found["missing"] == [
        "the end of rank 1 (host1, pid 1001), which was killed",
        "1.23 s of rank 2 (host2, pid 1002), whose disk was slow",
        "all of rank 3, whose part is not here",
    ]
    text = table.text(found)
    for one in found["missing"]:
        assert f"missing: {one}" in text.splitlines()


def test_a_rank_whose_part_is_missing_is_named_where_others_have_its_number_among_themselves():
    world = world_of(3)
    world.call(compares=True)
    left = [world.members[0], world.members[2]]
    World(left).call(compares=True)
    assert summary_of(left)["missing"] == ["all of rank 1, whose part is not here"]


def test_nothing_is_missing_of_a_job_that_came_to_its_end():
    assert summary_of(busy_job().members)["missing"] == []


def test_one_start_after_the_other_is_counted():
    first, second = (
        world_of(2),
        World(SimulatedProcess(LocalClock(0, 1.0), n, restart=1, begins=HOUR) for n in range(2)),
    )
    for world in (first, second):
        world.call(compares=True)
    found = summary_of([*first.members, *second.members], killed=first.members)
    assert found["starts"] == 2
    assert found["seconds"] == pytest.approx(3600, rel=0.01)
    assert [rank["name"] for rank in found["ranks"]][2:] == [
        "rank 0 (host0, pid 2000, start 2)",
        "rank 1 (host1, pid 2001, start 2)",
    ]
    assert "2 starts, one after the other" in table.text(found)


def test_ranks_that_never_came_to_a_call_are_of_one_start():
    world = world_of(3)
    for process in world.members:
        process.span(SPAN_KINDS.index("program"), SECOND)
    found = summary_of(world.members)
    assert found["starts"] == 1


def test_ranks_that_were_killed_before_they_did_anything_have_a_table():
    found = summary_of(world_of(2).members)
    assert found["seconds"] == 0
    assert "2 processes, 0.000 s" in table.text(found)


def large_job():
    world = world_of(64)
    for n in range(100):
        world.works(MILLISECOND)
        text = f"all_reduce(SUM, {n} leaves, 4.1 MB) at a_file_with_a_long_name.py:{1000 + n}"
        world.call(text, late={world.members[n % 64]: 5 * MILLISECOND}, compares=n in (0, 99))
    return world


@pytest.mark.parametrize("num_killed", [0, 64])
def test_a_table_is_one_screen_for_many_ranks_and_call_sites(num_killed):
    world = large_job()
    found = summary_of(world.members, killed=world.members[:num_killed])
    assert len(found["ranks"]) == 64
    assert (len(found["sites"]), found["num_sites"]) == (10, 100)
    lines = table.text(found).splitlines()
    assert len(lines) <= 50
    assert "and 52 more: see --json" in lines
    assert "and 90 more, which cost less" in lines


def test_a_long_name_of_a_file_does_not_hide_the_line():
    found = summary_of(large_job().members)
    for site in found["sites"]:
        number = site["line"].rpartition(":")[2]
        assert f"{number} " in table.text(found)


def test_the_summary_as_json_is_one_line_with_all_of_it():
    found = summary_of(busy_job().members)
    text = json.dumps(found)
    assert text.count("\n") == 0
    assert json.loads(text) == found


def test_a_table_says_as_much_of_what_came_from_json():
    found = summary_of(busy_job().members)
    assert table.text(json.loads(json.dumps(found))) == table.text(found)


def test_a_picture_has_each_moment_once_from_the_first_slice_to_the_last():
    """Slices stand as they ended: the inner ones first, and those of calls behind all spans."""
    slices = [
        *(("input", 2, 3), ("input", 1, 5), ("input", 4, 6), ("input", 4, 6)),
        *(("commit", 11, 12), ("recovery", 11.5, 13), ("program", 0.5, 19)),
        *(("collective", 3, 5), ("wait", 3, 4), ("move", 4, 5), ("checkpoint", 4.5, 7)),
    ]
    events = [{"cat": kind, "ts": begin, "dur": end - begin} for kind, begin, end in slices]
    found = shares(events, np.array([0.0, 10.0, 20.0]))
    expected = {
        "wait": [1, 0],
        "checkpoint": [2.5, 0],
        "move": [0.5, 0],
        "elastic": [0, 2],
        "input": [2, 0],
        "compute": [3.5, 7],
    }
    assert found.keys() == expected.keys()
    for kind, share in found.items():
        assert (10 * share).tolist() == pytest.approx(expected[kind], abs=1e-9), kind
