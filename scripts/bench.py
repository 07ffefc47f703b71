#!/usr/bin/env python3
"""Measure what the package costs, on the ranks of each MPI library.

    scripts/bench.py agreement               # one table for Open MPI, one for MPICH
    scripts/bench.py agreement --mpi mpich --ranks 2,3 --repeat 1000
    scripts/bench.py misuse --check          # exit status 1 when a goal is missed

It makes the environments that it needs, as scripts/test does. How it measures is told in
benchmarks/measuring.py, what a table is in benchmarks/__init__.py.
"""

import argparse
import datetime
import importlib
import json
import os
import sys

import benchmarks
from benchmarks import launching

# The package of this checkout, whatever is installed, and the table of mistakes.
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
    status = 0
    for name in settings.names:
        for library in settings.mpi:
            status |= measured(name, library, settings)
    return status


def parsed():
    """Return the options of the command line."""
    first = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(description=first)
    parser.add_argument(
        "names",
        nargs="+",
        choices=benchmarks.NAMES,
        metavar="NAME",
        help=" or ".join(benchmarks.NAMES),
    )
    parser.add_argument(
        "--ranks", type=numbers, metavar="N[,N...]", help="default: those that the goals speak of"
    )
    parser.add_argument(
        "--mpi", type=libraries, default=launching.LIBRARIES, help="default: openmpi,mpich"
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="how often each is measured")
    parser.add_argument("--quick", action="store_true", help="a trial: the numbers mean nothing")
    parser.add_argument("--check", action="store_true", help="a goal that is missed is a failure")
    return parser.parse_args()


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
    """Measure and print one table with one library; return the exit status."""
    from benchmarks.tables import table  # what it imports needs the environment

    module = importlib.import_module(f"benchmarks.{name}")
    python = launching.find_interpreter(library)
    outcomes = []
    for launch in module.launches(settings):
        if sys.stderr.isatty():
            print(f"{library}: {name}, {launch.part} on {launch.ranks} ranks", file=sys.stderr)
        outcome = launching.start(python, name, launch)
        if outcome.status != 0 and not launch.may_fail:
            last = outcome.records[-1:]
            text = f"{launch} ended with status {outcome.status}, its last record is {last}"
            print(f"{text}\n{outcome.output}", file=sys.stderr)
            return 1
        outcomes.append(outcome)
    rows = module.rows(outcomes)
    print(module.__doc__.splitlines()[0])
    print(f"{datetime.datetime.now():%Y-%m-%d %H:%M}; {outcomes[0].facts}\n")
    print(table(rows, getattr(module, "COMPARED", "against it")))
    if hasattr(module, "footer"):
        print(f"\n{module.footer(rows)}")
    print(flush=True)
    is_wrong = any(row.problem for row in rows)
    return int(is_wrong or (settings.check and any(row.is_over for row in rows)))


def work(name, part, arguments, path):
    """Measure one part of a table on this rank; rank 0 writes to a file what comes out."""
    from benchmarks.measuring import World

    world = World(path)
    if world.rank == 0:
        world.tell({"facts": world.facts()})
    for record in getattr(importlib.import_module(f"benchmarks.{name}"), part)(world, **arguments):
        if world.rank == 0:
            world.tell(record)


if __name__ == "__main__":
    sys.exit(main())
