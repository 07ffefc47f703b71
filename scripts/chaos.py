#!/usr/bin/env python3
"""Kill ranks of small jobs at random moments, and see that all jobs end with the same bits.

    scripts/chaos.py --kills 200             # until so many ranks were killed
    scripts/chaos.py --seed 3 --only 17      # one trial again, by its number

A job trains on 2 to 6 ranks, with and without spares, inside of `strategy.run_elastic`. Each trial
kills some of its ranks by SIGKILL: when they have counted so many calls, or from outside after a
time; in pairs, in commits, in checkpoints, in the recovery of another loss, until one is left. It
demands the weights and losses of an undisturbed job on one process, to the bit, exit status 0, and
an end within 60 s. The exit status is 1 where anything else came. What a trial is stands in
kills/trials.py, which moments there are in kills/plans.py. It needs Open MPI 5 beside the
interpreter that runs this.
"""

import argparse
import collections
import datetime
import os
import statistics
import sys
import tempfile
from pathlib import Path

from kills.plans import KINDS, LAYOUTS, planned
from kills.trials import Trial, problems, run, run_alone

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
    parser.add_argument("--verbose", action="store_true", help="print a line for each trial")
    options = parser.parse_args()
    chaos = Chaos(options.seed)
    number = 0 if options.only is None else options.only
    while len(chaos.kills) < options.kills:
        chaos.attempt(number, options.verbose or options.only is not None)
        number += 1
        if options.only is not None:
            break
    print(chaos.table())
    return int(bool(chaos.failures))


class Chaos:
    """Trials, and what came of them.

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
            again = "" if number is None else f" (--seed {self.seed} --only {number})"
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


def _most(counts):
    """Return the greatest number of each phase."""
    most = collections.Counter()
    for one in counts:
        most |= collections.Counter(one)
    return most


def _spread(name, values):
    if len(values) < 2:
        return f"{name:24}  too few to tell"
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    found = [min(values), statistics.median(values), tenths[-1], max(values)]
    return f"{name:24}" + "".join(f"{value:9.3f}" for value in found)


if __name__ == "__main__":
    sys.exit(main())
