#!/usr/bin/env python3
"""Kill what belongs to small jobs at random moments, and see that all end with the same bits.

    scripts/chaos.py --kills 200                         # until so much was killed
    scripts/chaos.py --family command --mpi mpich        # one of the two families of trials
    scripts/chaos.py --family calls --seed 3 --only 17   # one trial again, by its number

There are two families of trials, each with half of the kills. Both demand the weights and losses of
an undisturbed job on one process, to the bit, and exit status 0. The exit status is 1 where
anything else came.

*calls*: a job trains on 2 to 6 ranks, with and without spares, inside of `strategy.run_elastic`.
Each trial kills some of its ranks by SIGKILL: when they have counted so many calls, or from outside
after a time; in pairs, in commits, in checkpoints, in the recovery of another loss, until one is
left. It demands an end within 60 s. What a trial is stands in kills/trials.py, which moments there
are in kills/plans.py. It needs Open MPI 5 beside the interpreter that runs this.

*command*: `python -m mpi_replica run --restarts 9` with a program that goes on from checkpoints.
From the first moment of the command to its last, one to three of the processes below it are killed
by SIGKILL: ranks, the launcher's processes and daemons. Kinds of processes are drawn first. It
demands an end within 90 s, and that nothing is left: no process, no file in /dev/shm and in TMPDIR.
A job that dies three times within 10 s of its start is given up, so nothing is killed after two
restarts and two kills. What a trial is stands in kills/whole_command.py. It needs root, since each
trial has hosts of its own (tests/hosts). Times are drawn anew by `--only`, but not what the
processes do meanwhile.
"""

import argparse
import collections
import contextlib
import datetime
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path

# Of the tests: the hosts.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from kills import whole_command
from kills.plans import KINDS, LAYOUTS, planned
from kills.trials import ROOT, Trial, problems, run, run_alone

# The ranks share the cores. On one host a job starts sooner without the transports for several.
_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}

# On a busy machine Open MPI's launcher fails now and then, before it has started a rank.
_STARTS = 3


def main():
    """Run trials, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="how many; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the trials; default: %(default)s")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run this trial alone")
    parser.add_argument("--family", choices=["calls", "command"], help="default: both")
    parser.add_argument("--mpi", default="openmpi,mpich", help="of commands; default: %(default)s")
    parser.add_argument(
        "--hosts", action="store_true", help="every third trial of a command is on three hosts"
    )
    parser.add_argument("--verbose", action="store_true", help="print a line for each trial")
    options = parser.parse_args()
    families = []
    if options.family != "command":
        families.append(Chaos(options.seed))
    if options.family != "calls":
        families.append(WholeCommand(options.seed, options.mpi.split(","), options.hosts))
    for family in families:
        number = 0 if options.only is None else options.only
        with contextlib.suppress(KeyboardInterrupt):  # what came so far is told
            while len(family.kills) < options.kills / len(families):
                family.attempt(number, options.verbose or options.only is not None)
                number += 1
                if options.only is not None:
                    break
        print(family.table(), flush=True)
    return int(any(family.failures for family in families))


class Chaos:
    """Trials of the family *calls*, and what came of them.

    Parameters
    ----------
    seed : int
    """

    def __init__(self, seed):
        self.seed = seed
        #: The moments of all kills, by the kind of trial.
        self.kills = []
        self.failures = []
        self._environment = {**os.environ, **_SETTINGS}
        self._hashes = {}
        self._undisturbed = {}
        self._outcomes = []
        self._start = datetime.datetime.now()

    def attempt(self, number, is_told):
        """Run a trial, and keep what came of it."""
        for layout in LAYOUTS:  # the moments are drawn from what undisturbed jobs do
            if layout not in self._undisturbed:
                self._undisturbed[layout] = self._run(Trial(*layout), "undisturbed", None)
        jobs = self._undisturbed.items()
        counts = {
            layout: _most(told["counts"] for told in job.results.values()) for layout, job in jobs
        }
        seconds = {layout: job.seconds for layout, job in jobs}
        trial, kind = planned(self.seed, number, counts, seconds)
        outcome = self._run(trial, kind, number)
        self.kills += [kind] * len(outcome.killed)
        self._outcomes.append((trial, outcome))
        if is_told:
            print(f"{number}, {kind}, {trial}: {len(outcome.losses)} losses, {outcome.killed}")
            sys.stdout.flush()

    def _run(self, trial, kind, number):
        if trial.replicas not in self._hashes:
            with tempfile.TemporaryDirectory() as folder:
                self._hashes[trial.replicas] = run_alone(
                    sys.executable, Path(folder), trial.replicas, self._environment
                )
        for _ in range(_STARTS):
            with tempfile.TemporaryDirectory() as folder:
                outcome = run(sys.executable, Path(folder), trial, self._environment)
            if outcome.has_begun:
                break
            print(f"the launcher failed with status {outcome.status}: {outcome.output}")
        found = problems(outcome, self._hashes[trial.replicas])
        if found:
            self.failures.append(found)
            again = (
                "" if number is None else f" (--family calls --seed {self.seed} --only {number})"
            )
            print(f"{kind}{again}, {trial}: {'; '.join(found)}\n{outcome.killed}")
            print(f"{outcome.output}\n", flush=True)
        return outcome

    def table(self):
        """Return what came of all trials, as lines of a table."""
        outcomes = [outcome for _, outcome in self._outcomes]
        losses = [loss for outcome in outcomes for loss in outcome.losses]
        more = [
            outcome.seconds - self._undisturbed[trial.ranks, trial.spares, per_rank].seconds
            for trial, outcome in self._outcomes
            for per_rank in [trial.replicas_per_rank]
            if outcome.killed and outcome.results
        ]
        restored = sum(loss["step"] is None for loss in losses)
        hangs = sum(outcome.is_hung for outcome in outcomes)
        wrong = sum("wrong hashes" in "; ".join(found) for found in self.failures)
        minutes = (datetime.datetime.now() - self._start).total_seconds() / 60
        by_kind = collections.Counter(self.kills)
        lines = [
            f"{self._start:%Y-%m-%d %H:%M}; seed {self.seed}; {minutes:.0f} minutes;"
            f" {os.cpu_count()} cores, load {', '.join(f'{x:.1f}' for x in os.getloadavg())}",
            f"jobs                {len(outcomes):4}",
            f"kills               {len(self.kills):4}",
            *(f"  {kind:18}{by_kind[kind]:4}" for kind in KINDS),
            f"losses              {len(losses):4}  {restored} of them back to a checkpoint",
            f"hangs               {hangs:4}",
            f"wrong hashes        {wrong:4}",
            f"other failures      {len(self.failures) - hangs - wrong:4}",
            "",
            "                              min   median     90 %      max",
            _spread("seconds of a loss", [loss["seconds"] for loss in losses]),
            _spread("seconds more of a job", more),
        ]
        return "\n".join(lines)


class WholeCommand:
    """Trials of the family *command*, and what came of them.

    Parameters
    ----------
    seed : int
    libraries : sequence of str
        The MPI libraries: ``openmpi``, ``mpich``.
    has_hosts : bool
        Whether some trials are on several hosts.
    """

    def __init__(self, seed, libraries, has_hosts):
        self.seed = seed
        self._libraries, self._has_hosts = libraries, has_hosts
        #: The kinds of processes that were killed, and the library.
        self.kills = []
        self.failures = []
        self._undisturbed = {}
        self._outcomes = []
        self._start = datetime.datetime.now()
        with tempfile.TemporaryDirectory() as folder:
            self._hash = run_alone(
                sys.executable, Path(folder), whole_command.REPLICAS, {**os.environ, **_SETTINGS}
            )

    def attempt(self, number, is_told):
        """Run a trial, and keep what came of it."""
        trial = whole_command.planned(
            self.seed, number, self._libraries, self._has_hosts, self._seconds
        )
        name = f"--family command --seed {self.seed} --only {number}"
        outcome = self._run(trial, name, is_told)
        self.kills += [(victim.kind, trial.layout.library) for victim, _ in outcome.killed]
        self._outcomes.append(outcome)

    def _seconds(self, layout):
        """Return how long an undisturbed job takes."""
        if layout not in self._undisturbed:
            trial = whole_command.Trial(layout)
            self._undisturbed[layout] = self._run(trial, "undisturbed", False).seconds
        return self._undisturbed[layout]

    def _run(self, trial, name, is_told):
        python = sys.executable
        if trial.layout.library == "mpich":
            made = str(ROOT / ".venv-mpich/bin/python")
            python = os.environ.get("MPI_REPLICA_TEST_MPICH") or made
        with tempfile.TemporaryDirectory() as folder:
            outcome = whole_command.run(python, Path(folder), trial)
        found = outcome.problems(self._hash)
        if found:
            self.failures.append(found)
        if found or is_told:
            killed = ", ".join(f"{one.kind} after {when:.3f} s" for one, when in outcome.killed)
            restarts = f"{outcome.restarts} restarts in {outcome.seconds:.1f} s"
            print(f"{name}, {trial.layout}: {restarts}; {killed}; {'; '.join(found)}")
            print(outcome.output, flush=True)
        return outcome

    def table(self):
        """Return what came of all trials, as lines of a table."""
        by_kind = collections.Counter(self.kills)
        libraries = sorted({library for _, library in by_kind})
        faults = collections.Counter(
            re.sub(r"[ :].*", "", fault) for found in self.failures for fault in found
        )
        ends = collections.Counter(
            "hang" if outcome.is_hung else f"status {outcome.status}" for outcome in self._outcomes
        )
        files = collections.Counter(
            name for outcome in self._outcomes for name in outcome.kinds_of_files()
        )
        killed = [outcome for outcome in self._outcomes if outcome.killed]
        more = [
            outcome.seconds - self._undisturbed[outcome.trial.layout]
            for outcome in killed
            if outcome.status == 0
        ]
        minutes = (datetime.datetime.now() - self._start).total_seconds() / 60
        lines = [
            f"{self._start:%Y-%m-%d %H:%M}; seed {self.seed}; {minutes:.0f} minutes;"
            f" {os.cpu_count()} cores, load {', '.join(f'{x:.1f}' for x in os.getloadavg())}",
            f"commands            {len(self._outcomes):4}  {len(killed)} with kills",
            "kills               " + "".join(f"{library:>10}" for library in libraries),
        ]
        for kind in sorted({kind for kind, _ in by_kind}):
            row = "".join(f"{by_kind[kind, library]:10}" for library in libraries)
            lines.append(f"  {kind:18}{row}")
        lines += [
            f"restarts            {sum(outcome.restarts for outcome in self._outcomes):4}",
            *(f"ends: {end:14}{count:4}" for end, count in sorted(ends.items())),
            f"hangs               {faults['hangs']:4}",
            f"wrong hashes        {faults['wrong']:4}",
            f"wrong statuses      {faults['exit']:4}",
            f"processes left over {faults['processes']:4}",
            f"files left over     {faults['files']:4}",
            *(f"  {name}: {count}" for name, count in files.most_common()),
            "",
            "                              min   median     90 %      max",
            _spread("seconds more of a command", more),
            _spread("seconds to the last end", [one.seconds_to_go for one in killed]),
        ]
        return "\n".join(lines)


def _most(counts):
    """Return the greatest number of each phase."""
    most = collections.Counter()
    for one in counts:
        most |= collections.Counter(one)
    return most


def _spread(name, values):
    if len(values) < 2:
        return f"{name:25} too few to tell"
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    found = [min(values), statistics.median(values), tenths[-1], max(values)]
    return f"{name:25}" + "".join(f"{value:9.3f}" for value in found)


if __name__ == "__main__":
    sys.exit(main())
