"""Traces of jobs that run, end and die in all ways."""

import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trace_format
from command_line import LIMIT_SECONDS, call, ready, started, variables
from jobs import run_to_its_end
from launching import LIBRARIES, RANKS, ROOT
from mpi_replica.__main__ import main
from mpi_replica.ranks.watch.event_log import EventLog

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

only_elastic = pytest.mark.skipif("openmpi" not in LIBRARIES, reason="Open MPI alone has ULFM")

PROGRAMS = ROOT / "tests" / "traced"
LATE, PARTS, ENDINGS = (PROGRAMS / name for name in ("late.py", "parts.py", "endings.py"))


def run_traced(library, path, *arguments, env=None):
    """Run a job with a trace that is right in all things; return what came of both."""
    done = call(library, "run", "--trace", path, *arguments, env=env)
    return done, checked(path)


def checked(path):
    """Return the trace at a path, of which no parts are left."""
    trace = trace_format.read(path)
    trace_format.check(trace)
    assert not Path(f"{path}.parts").exists()
    return trace


def told(folder):
    """Return what each rank has told."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("told-*.json"))]


def line_of(program, text):
    """Return the line that has this comment, as a trace names it."""
    lines = program.read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return f"{program.name}:{number}"


# What is in it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
def test_any_program_gives_a_trace_in_the_format_which_tells_all_of_each_call(ranks, tmp_path):
    library = LIBRARIES[ranks % len(LIBRARIES)]
    path = tmp_path / "my trace.json.gz"
    program = [PROGRAMS / "random_steps.py", ranks, tmp_path / "saved"]
    done, trace = run_traced(library, path, "-n", ranks, *program)
    assert done.returncode == 0, done.stderr
    see = shlex.join(["python", "-m", "mpi_replica", "trace", str(path)])
    assert f"mpi_replica run: {path} is written. See: {see}\n" in done.stderr
    summary = trace_format.summary(trace)
    assert (summary["missing"], summary["starts"]) == ([], 1)
    assert [rank["rank"] for rank in summary["ranks"]] == list(range(ranks))
    assert {tid for _, tid in trace_format.tracks(trace)} == set(range(2 * ranks + 1))
    calls = trace_format.slices(trace, "collective")
    if ranks == 1:  # which waits for nobody, and is right by its own clock
        assert summary["clock_bound_seconds"] == 0
        assert calls
    else:
        assert trace_format.whole_calls(trace) == [one for one in calls if one.args["bytes"]]
        assert trace_format.meetings(trace)


def test_what_threads_of_a_rank_do_at_the_same_time_stands_on_tracks_of_their_own(tmp_path):
    """A second strategy, and the thread that reads ahead."""
    path = tmp_path / "trace.json"
    done, trace = run_traced(LIBRARIES[0], path, "-n", 2, PROGRAMS / "threads.py")
    assert done.returncode == 0, done.stderr
    spans = [one.name for one in trace_format.slices(trace, "program")]
    assert spans.count("step") == 2 * 2 * 20


@pytest.fixture(scope="module", params=LIBRARIES)
def late_job(request, tmp_path_factory):
    """A trace of three ranks with wrong clocks, and when each came to each call in truth."""
    folder = tmp_path_factory.mktemp("late")
    done, trace = run_traced(request.param, folder / "trace.json", "-n", 3, LATE, folder)
    assert done.returncode == 0, done.stderr
    return trace, np.array(told(folder))


def test_clocks_that_are_hours_off_and_drift_come_out_within_the_bound_that_is_told(late_job):
    trace_format.check_clocks(*late_job)


def test_no_call_ends_on_a_rank_before_it_has_begun_on_all(late_job):
    trace, _ = late_job
    for calls in trace_format.meetings(trace):
        last = max(call.begin for call in calls)
        assert min(call.end for call in calls) >= last - trace_format.bound_ns(trace)


def test_a_late_rank_is_named_with_its_share_its_lines_and_how_late_it_is(late_job):
    trace, marks = late_job
    summary = trace_format.summary(trace)
    came = marks[..., 1]
    line = line_of(LATE, "they wait here")
    (site,) = [site for site in summary["sites"] if site["line"] == line]
    shares = {int(re.match(r"rank (\d)", name)[1]): n for name, n in site["last"].items()}
    for rank in range(3):
        truth = (came.argmax(axis=0) == rank).mean()
        assert shares.get(rank, 0.0) == pytest.approx(truth, abs=0.1)
    (late,) = [late for late in summary["late"] if late["line"] == line]
    assert late["rank"].startswith("rank 1 (")
    assert late["share"] == shares[1]
    # By the file, whose clock another test holds to the truth: a mark stands before a call, and on
    # a busy machine long before.
    here = [calls for calls in trace_format.meetings(trace) if calls[0].args["line"] == line]
    waited_for = [calls for calls in here if calls[0].args.get("last") == late["rank"]]
    assert len(waited_for) == late["share"] * len(here)
    begins = np.sort([[call.begin for call in calls] for calls in waited_for])
    mean = np.diff(begins)[:, -1].mean()
    assert late["seconds"] * 1e9 == pytest.approx(mean, rel=1e-6)
    place, share = next(iter(late["meanwhile"].items()))
    file, _, line = line_of(LATE, "it is here").partition(":")
    # Python 3.14 lets other threads run at the end of a loop.
    assert place in {f"{file}:{number} in be_late" for number in (int(line), int(line) + 1)}
    assert share > 0.5


# Parts of a program ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=LIBRARIES)
def parts_job(request, tmp_path_factory):
    """The folder in which two ranks have traced parts of a program, and what each has told."""
    folder = tmp_path_factory.mktemp("parts")
    done = call(request.param, "run", "-n", 2, PARTS, folder)
    assert done.returncode == 0, done.stderr
    first, second = told(folder)
    assert first == second
    return folder, first


@pytest.mark.parametrize("name", ["first.json", "second.json.gz", "last.json"])
def test_each_part_of_a_program_has_a_trace_of_its_own(name, parts_job):
    folder, errors = parts_job
    assert errors[name.partition(".")[0]] is None
    trace = checked(folder / name)
    summary = trace_format.summary(trace)
    assert (summary["missing"], summary["starts"], len(summary["ranks"])) == ([], 1, 2)
    spans = [one.name for one in trace_format.slices(trace, "program")]
    assert (spans.count("all of it"), spans.count("add up")) == (2, 5 * 4)


def test_a_step_that_is_a_span_has_its_own_name(parts_job):
    """The ranks also compare by it whether they run the same."""
    folder, _ = parts_job
    runs = trace_format.slices(trace_format.read(folder / "first.json"), "run")
    assert {one.name.partition(" at ")[0] for one in runs} == {"add_up"}


def test_a_trace_stands_where_its_path_was_when_it_began(parts_job):
    folder, errors = parts_job
    assert errors["moved"] is None
    checked(folder / "moved.json")


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("below a file", "NotADirectoryError"),
        ("below a file on one rank", "FileNotFoundError"),
        ("a folder", "IsADirectoryError"),
        ("another on each rank", "CollectiveMismatchError"),
    ],
)
def test_a_path_that_is_wrong_is_the_same_error_on_all_ranks(what, error, parts_job):
    _, errors = parts_job
    assert errors[what][0] == error


def test_a_part_that_fails_leaves_what_becomes_a_trace(parts_job, capsys):
    folder, errors = parts_job
    path = folder / "failed.json"
    assert errors["failed"] == ["KeyError", "'no such row'"]
    assert not path.exists()
    assert main(["trace", str(path)]) == 0
    assert "all_reduce" in capsys.readouterr().out
    trace = checked(path)
    assert trace_format.summary(trace)["missing"] == []


def test_what_an_earlier_one_has_left_is_in_no_later_trace(parts_job):
    folder, errors = parts_job
    assert (errors["failed at first"][0], errors["again"]) == ("KeyError", None)
    found = trace_format.summary(checked(folder / "again.json"))
    assert (found["missing"], found["starts"]) == ([], 1)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["step"]["runs"] == 5


def test_a_span_that_replicas_share_has_the_times_of_each(parts_job):
    folder, errors = parts_job
    assert errors["of replicas"] is None
    slices = trace_format.slices(checked(folder / "replicas.json"), "program")
    for replica_id in range(4):
        (end,) = [one for one in slices if one.name == f"end of {replica_id}"]
        track = end.pid, end.tid
        outer, inner = [
            one for one in slices if (one.pid, one.tid) == track and one.name == "shared"
        ]
        assert outer.begin <= inner.begin < inner.end <= end.begin <= end.end <= outer.end


def test_a_picture_is_drawn_of_any_trace(parts_job, tmp_path, capsys):
    """Also of one in which some processes have done nothing that is shown."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    folder, _ = parts_job
    trace = trace_format.read(folder / "first.json")
    for kept in ([0, 1], [1], []):
        trace["traceEvents"] = [
            event for event in trace["traceEvents"] if event["ph"] != "X" or event["pid"] in kept
        ]
        path, picture = tmp_path / "trace.json", tmp_path / f"{len(kept)}.png"
        path.write_text(json.dumps(trace))
        assert main(["trace", str(path), "--plot", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG\r\n")
        assert "all_reduce" in capsys.readouterr().out


def test_whoever_reads_the_table_may_stop_in_the_middle(parts_job):
    folder, _ = parts_job
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mpi_replica", "trace", folder / "failed.json"]
    with open(writer, "wb") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


# How it comes about ----------------------------------------------------------------------------


def test_a_table_that_can_not_be_written_is_told_in_a_line(parts_job):
    folder, _ = parts_job
    command = [sys.executable, "-m", "mpi_replica", "trace", folder / "first.json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "the table can't be written: [Errno 28] No space left on device" in line


def test_a_job_of_any_launcher_is_traced_where_its_environment_says_so(tmp_path):
    """Its parts become a trace when somebody looks at it. None of it can be traced once more."""
    library, path = LIBRARIES[-1], tmp_path / "of_job.json"
    arguments = [PARTS, tmp_path]
    run_to_its_end(library, 2, arguments, succeeds=True, env={"MPI_REPLICA_TRACE": str(path)})
    first, second = told(tmp_path)
    assert first == second
    assert first.pop("another on each rank")[0] == "CollectiveMismatchError"
    assert {kind for kind, _ in first.values()} == {"ContextError"}
    assert len(list(Path(f"{path}.parts").iterdir())) == 2
    done = call(library, "trace", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 processes, ")
    assert trace_format.summary(checked(path))["missing"] == []


MISTAKES = {
    "No such file or directory: 'absent.json'": ["trace", "absent.json"],
    "text.json is no trace of mpi_replica": ["trace", "text.json"],
    "other.json is no trace of mpi_replica": ["trace", "other.json"],
    "cut.json.gz is no trace of mpi_replica": ["trace", "cut.json.gz"],
    "text.json.gz is no trace of mpi_replica": ["trace", "text.json.gz"],
    "broken.json.gz is no trace of mpi_replica": ["trace", "broken.json.gz"],
    "empty.json.gz is no trace of mpi_replica": ["trace", "empty.json.gz"],
    "picture.png is no trace of mpi_replica": ["trace", "picture.png"],
    "list.json is no trace of mpi_replica": ["trace", "list.json"],
    "deep.json is no trace of mpi_replica": ["trace", "deep.json"],
    "words.json is no trace of mpi_replica": ["trace", "words.json"],
    "half.json, or what ranks have left for it, is damaged": ["trace", "half.json"],
    "Is a directory: 'folder'": ["trace", "folder"],
    "text.json/a.json: nothing can be": ["run", "--trace", "text.json/a.json", "-n", "1"],
    "--trace-last": ["run", "--trace", "a.json", "--trace-last", "0", "-n", "1"],
    "'soon' is no number of seconds": ["run", "--trace", "a", "--trace-last", "soon", "-n", "1"],
    "'two' is no integer": ["run", "-n", "two"],
    "ask for --trace FILE, too": ["run", "--no-samples", "-n", "1"],
    "--trace-last and --no-samples are": ["run", "--trace-last", "9", "-n", "1"],
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_the_command_line_is_told_in_a_line(text, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", variables())
    Path("text.json").write_text("no trace")
    Path("text.json.gz").write_text("no trace")
    Path("other.json").write_text('{"traceEvents": []}')
    whole = gzip.compress(b'{"otherData": {"mpi_replica": {"version": 1}}}')
    Path("cut.json.gz").write_bytes(whole[:-20])
    Path("broken.json.gz").write_bytes(whole[:10] + b"\xff" + whole[11:])
    Path("empty.json.gz").touch()
    Path("picture.png").write_bytes(b"\x89PNG\r\n" + bytes(range(256)))
    Path("list.json").write_text('[{"name": "step"}]')
    Path("deep.json").write_text("[" * 100_000)
    Path("words.json").write_text('{"otherData": {"mpi_replica": {"version": "one"}}}')
    Path("half.json").write_bytes(gzip.decompress(whole))
    Path("folder").mkdir()
    arguments = MISTAKES[text]
    if arguments[0] == "run":
        arguments = [*arguments, "-c", "print('started')"]
    try:
        status = main(arguments)
    except SystemExit as end:  # of argparse
        status = end.code
    found = capfd.readouterr()
    assert (status, found.out) == (2, "")
    assert text in found.err
    assert "Traceback" not in found.err
    assert len(found.err) < 1000
    assert found.err.startswith("usage: ") or len(found.err.splitlines()) == 1


def test_what_an_encoding_lacks_is_shown_in_another_way(tmp_path):
    """Commands print µs, and names of files."""
    path = tmp_path / "job.json"
    log = EventLog(str(path))
    log.new_world(rank=0, size=1, name=1)
    log.close()
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    done = call(LIBRARIES[0], "trace", path, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"clocks agree within 0.0 \xb5s" in done.stdout
    (tmp_path / "\N{MICRO SIGN}.py").write_text("")
    arguments = ["run", "--dry-run", "-n", 2, "\N{MICRO SIGN}.py"]
    done = call(LIBRARIES[0], *arguments, env=ascii_only, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("python '\N{MICRO SIGN}.py'\n")


def test_a_trace_that_would_be_a_folder_is_refused_before_anything_is_started(tmp_path):
    done = call(LIBRARIES[0], "run", "--trace", tmp_path, "-n", 1, "-c", "print('started')")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--trace {tmp_path}: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_files_of_others_in_the_folder_of_parts_stay_and_are_no_trace(tmp_path):
    path = tmp_path / "data"
    mine = tmp_path / "data.parts" / "precious.csv"
    mine.parent.mkdir()
    mine.write_text("1,2")
    arguments = [ENDINGS, "exits", tmp_path / "saved"]
    done = call(LIBRARIES[0], "run", "--trace", path, "-n", 2, *arguments)
    assert done.returncode == 3, done.stderr
    assert [file.name for file in mine.parent.iterdir()] == ["precious.csv"]
    assert call(LIBRARIES[0], "trace", path).returncode == 0
    assert trace_format.summary(trace_format.read(path))["missing"] == []
    assert mine.read_text() == "1,2"


def test_what_cannot_be_put_together_is_kept(tmp_path):
    path = tmp_path / "trace.json"
    folder = Path(f"{path}.new")  # where it would be written
    arguments = [ENDINGS, "exits", tmp_path / "saved"]
    folder.mkdir()
    done = call(LIBRARIES[0], "run", "--trace", path, "-n", 2, *arguments)
    assert done.returncode == 3, done.stderr
    told = f"What it is made of stays in {path}.parts: copy that to another disk: '{path}'\n"
    assert f"there is no trace {path}: " in done.stderr
    assert told in done.stderr
    done = call(LIBRARIES[0], "trace", path)
    assert (done.returncode, done.stderr.endswith(told)) == (2, True)
    folder.rmdir()
    assert call(LIBRARIES[0], "trace", path).returncode == 0
    assert trace_format.summary(checked(path))["missing"] == []


# How a job ends --------------------------------------------------------------------------------


def run_ending(library, folder, way, *options, ranks=2):
    """Return the job that ends in a way, its trace, and what that lacks.

    It can lack the ends of processes only: all of them have written a part.
    """
    path = folder / "trace.json"
    arguments = [*options, "-n", ranks, ENDINGS, way, folder / "saved"]
    done, trace = run_traced(library, path, *arguments)
    summary = trace_format.summary(trace)
    ends = {f"the end of {rank['name']}, which was killed": rank for rank in summary["ranks"]}
    assert set(summary["missing"]) <= ends.keys()
    assert all(missing in done.stderr for missing in summary["missing"])
    return done, trace, [ends[missing]["name"] for missing in summary["missing"]]


def ranks_of(names):
    return {int(re.match(r"rank (-?\d+) \(", name)[1]) for name in names}


@pytest.mark.parametrize(
    ("way", "status"),
    [("exits", 3), ("fails on all ranks", 1), ("fails on one rank", 1)],
)
def test_a_program_that_ends_by_itself_leaves_all_of_its_trace(way, status, tmp_path):
    done, trace, missing = run_ending(LIBRARIES[0], tmp_path, way)
    assert done.returncode == status, done.stderr
    assert missing == []
    assert ranks_of(rank["name"] for rank in trace_format.summary(trace)["ranks"]) == {0, 1}
    assert "others have not yet" not in done.stderr


@pytest.mark.parametrize(
    ("library", "way", "status"),
    [
        (LIBRARIES[-1], "is killed", 128 + signal.SIGKILL),
        (LIBRARIES[0], "exits at once", 3),
    ],
)
def test_a_trace_lacks_the_end_of_a_rank_that_is_lost(library, way, status, tmp_path):
    done, trace, missing = run_ending(library, tmp_path, way, "--restarts", 0)
    assert done.returncode == status, done.stderr
    assert 1 in ranks_of(missing)
    summary = trace_format.summary(trace)
    assert summary["starts"] == 1
    assert ranks_of(rank["name"] for rank in summary["ranks"]) == {0, 1}


def test_a_job_that_is_started_again_has_both_starts_in_its_trace(tmp_path):
    options = ["--restarts", 1]
    done, trace, missing = run_ending(LIBRARIES[0], tmp_path, "is killed once", *options)
    assert done.returncode == 0, done.stderr
    summary = trace_format.summary(trace)
    names = [rank["name"] for rank in summary["ranks"]]
    assert summary["starts"] == 2
    assert [re.sub(r" \(.*pid \d+", "", name) for name in names] == [
        *("rank 0)", "rank 1)", "rank 0, start 2)", "rank 1, start 2)")
    ]
    assert names[1] in missing
    assert set(missing) <= set(names[:2])


@only_elastic
def test_an_elastic_job_that_loses_a_rank_has_what_all_of_them_did_in_its_trace(tmp_path):
    done, trace, missing = run_ending("openmpi", tmp_path, "loses a rank", "--elastic", ranks=3)
    assert done.returncode == 0, done.stderr
    assert ranks_of(missing) == {1}
    assert trace_format.summary(trace)["starts"] == 1
    kinds = {one.pid: set() for one in trace_format.slices(trace)}
    for one in trace_format.slices(trace):
        kinds[one.pid].add(one.kind)
    assert [pid for pid in kinds if "recovery" in kinds[pid]] == [0, 2]


def test_a_job_that_is_interrupted_leaves_its_trace(tmp_path):
    path = tmp_path / "trace.json"
    arguments = ["--trace", path, "-n", 2, ENDINGS, "waits", tmp_path / "saved"]
    with started(LIBRARIES[0], "run", *arguments) as process:
        ready(process)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + signal.SIGINT, error
    summary = trace_format.summary(checked(path))
    assert ranks_of(rank["name"] for rank in summary["ranks"]) == {0, 1}
    assert summary["starts"] == 1


def test_a_look_at_a_job_that_still_runs_takes_nothing_from_its_trace(tmp_path):
    path = tmp_path / "trace.json"
    env = {"MPI_REPLICA_TRACE": str(path)}
    with started(LIBRARIES[0], "run", "-n", 2, ENDINGS, "waits", tmp_path, env=env) as process:
        ready(process)
        looks = [call(LIBRARIES[0], "trace", path) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_SECONDS)
    for done in looks:
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(", which was killed or still runs\n") == 2
    assert "still runs" not in call(LIBRARIES[0], "trace", path).stdout
    summary = trace_format.summary(checked(path))
    assert ranks_of(rank["name"] for rank in summary["ranks"]) == {0, 1}


def test_a_job_that_takes_too_long_leaves_its_trace(tmp_path):
    path = tmp_path / "trace.json"
    arguments = ["--timeout", 2, "--trace", path, "-n", 2, ENDINGS, "waits", tmp_path / "saved"]
    done = call(LIBRARIES[0], "run", *arguments)
    assert done.returncode == 124, done.stderr
    if done.stdout.count("ready") == 2:  # a slow machine may not come so far
        summary = trace_format.summary(checked(path))
        assert ranks_of(rank["name"] for rank in summary["ranks"]) == {0, 1}
        assert summary["starts"] == 1


def test_a_program_without_a_strategy_is_told_that_it_has_no_trace(tmp_path):
    path = tmp_path / "trace.json"
    arguments = ["--trace", path, "-n", 1, ENDINGS, "has no strategy", tmp_path]
    done = call(LIBRARIES[0], "run", *arguments)
    assert done.returncode == 0, done.stderr
    assert f"mpi_replica run: there is no trace {path}: no rank has written" in done.stderr
    assert list(tmp_path.iterdir()) == []
