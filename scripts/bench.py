#!/usr/bin/env python3
"""Measure what the package costs, on the ranks of each MPI library.

    scripts/bench.py calls all_reduce        # two tables for Open MPI, two for MPICH
    scripts/bench.py all --json bench.json   # everything, except `misuse` and `hosts`
    scripts/bench.py agreement --mpi mpich --ranks 2,3 --repeat 1000
    scripts/bench.py memory --check          # exit status 1 when a goal is missed
    scripts/bench.py --plot sizes.png        # time against size
    scripts/bench.py scale --plot scale.png  # on real networks, by a model

It makes the environments that it needs, as scripts/test does. How it measures is told in
benchmarks/measuring.py, what a table is in benchmarks/__init__.py.
"""

import argparse
import datetime
import importlib
import json
import os
import sys
from dataclasses import asdict

import benchmarks
from benchmarks import launching

# The package of this checkout, whatever is installed, and of the tests mistakes and hosts.
sys.path[:0] = [str(launching.ROOT), str(launching.ROOT / "tests")]


def main():
    """Measure what was asked for; print it as tables."""
    if sys.argv[1:2] == ["--worker"]:
        work(*json.loads(sys.argv[2]))
        return 0
    settings = parsed()
    if not launching.has_what_tables_need():
        python = launching.find_interpreter(settings.mpi[0])
        if python == sys.executable:
            sys.exit(f"{python} lacks what the package needs: pip install . in its environment")
        os.execv(python, [python, *sys.argv])
    if settings.plot:
        from benchmarks import plotting

        plotting.require()  # before the measurement, which takes minutes
    reports, status = [], 0
    for name in settings.names:
        for library in settings.mpi:
            report = measured(name, library, settings)
            if report is None:
                status = 1
                continue
            reports.append(report)
            is_over = settings.check and any(row.is_over for row in report.rows)
            status |= is_over or any(row.problem for row in report.rows)
            if settings.json:  # each time anew: what comes next may fail
                keep(reports, settings.json)
    if settings.plot:
        drawn = [report for report in reports if report.name == settings.drawn]
        if drawn:
            plotting.draw(settings.drawn, drawn, settings.plot)
    return int(status)


def keep(reports, path):
    """Write tables to a file, with the command that makes them."""
    made = {"command": sys.argv, "tables": [asdict(report) for report in reports]}
    with open(path, "w") as file:
        json.dump(made, file, indent=1)


def parsed():
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        type=tables,
        metavar="NAME",
        help=f"{', '.join(benchmarks.NAMES)}, or all for {', '.join(benchmarks.ALL)}",
    )
    parser.add_argument(
        "--ranks", type=numbers, metavar="N[,N...]", help="default: those that the goals speak of"
    )
    parser.add_argument(
        "--mpi", type=libraries, default=launching.LIBRARIES, help="default: openmpi,mpich"
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="how often each is measured")
    parser.add_argument(
        "--quick", action="store_true", help="a trial, with less data: the numbers mean nothing"
    )
    parser.add_argument("--check", action="store_true", help="a goal that is missed is a failure")
    parser.add_argument("--json", metavar="FILE", help="write all rows to a file, too")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw `scale`, or else `sizes`, which it measures, as a PNG"
    )
    settings = parser.parse_args()
    if settings.plot and not settings.plot.endswith(".png"):
        parser.error(f"--plot writes a PNG: {settings.plot!r} does not end in .png")
    names = [name for asked in settings.names for name in asked]
    if settings.plot:
        settings.drawn = "scale" if "scale" in names else "sizes"
        names.append(settings.drawn)
    if not names:
        parser.error("say what to measure; --help tells what there is")
    settings.names = list(dict.fromkeys(names))
    return settings


def tables(text):
    """Return the names of the tables that "calls" or "all" stands for."""
    if text != "all" and text not in benchmarks.NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(benchmarks.NAMES)}, all")
    return benchmarks.ALL if text == "all" else [text]


def numbers(text):
    """Return "2,4" as a list."""
    return [int(number) for number in text.split(",")]


def libraries(text):
    """Return "openmpi,mpich" as a list."""
    names = text.split(",")
    unknown = set(names) - set(launching.LIBRARIES)
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {launching.LIBRARIES}")
    return names


def measured(name, library, settings):
    """Measure and print one table with one library; return it, or None if a launch failed."""
    from benchmarks.tables import Report, rows_of  # what topics import needs the environment
    from hosts.namespaces import NoHostsError

    module = importlib.import_module(f"benchmarks.{name}")
    python = launching.find_interpreter(library, arrays=getattr(module, "NEEDS_ARRAYS", False))
    outcomes = []
    for launch in module.launches(settings):
        if sys.stderr.isatty():
            print(f"{library}: {name}, {launch.part} on {launch.ranks} ranks", file=sys.stderr)
        try:
            outcome = launching.start(library, python, name, launch)
        except NoHostsError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return None
        if outcome.status != 0 and not launch.may_fail:
            last = outcome.records[-1:]
            text = f"{launch} ended with status {outcome.status}, its last record is {last}"
            print(f"{text}\n{outcome.output}", file=sys.stderr)
            return None
        outcomes.append(outcome)
    report = Report(
        name,
        library,
        module.__doc__.splitlines()[0],
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}; {outcomes[0].facts}",
        list(getattr(module, "rows", rows_of)(outcomes)),
    )
    print(report.text())
    if hasattr(module, "footer"):
        print(f"\n{module.footer(report.rows)}")
    print(flush=True)
    return report


def work(name, part, arguments, path):
    """Measure one part of a table on this rank; rank 0 writes to a file what comes out."""
    from benchmarks.measuring import World
    from benchmarks.tables import Row

    world = World(path)
    if world.rank == 0:
        world.tell({"facts": world.facts()})
    for found in getattr(importlib.import_module(f"benchmarks.{name}"), part)(world, **arguments):
        if world.rank == 0:
            world.tell({"row": asdict(found)} if isinstance(found, Row) else found)


if __name__ == "__main__":
    sys.exit(main())
