"""Make a pytest run on several ranks behave like a run on one.

Every rank runs the same tests in the same order. After collection, after the body of each test,
and after a setup or teardown that failed, the ranks agree on the outcome, so that what fails on one
rank fails on all; rank 0 alone reports, with the text of every rank. A rank that does not arrive in
time waits in a collective call that another rank left: a rank that did arrive says so, shows where
it waits, and ends the job.

MPI_REPLICA_TEST_FENCE is this time in seconds, 30 by default.
"""

import contextlib
import faulthandler
import os
import platform
import signal
import time

import pytest

FENCE_SECONDS = float(os.environ.get("MPI_REPLICA_TEST_FENCE", "30"))
STACK_SIGNAL = signal.SIGUSR2  # a rank that gets it writes its Python stack, also inside MPI
PASSED = pytest.StashKey[bool]()  # of a test: its body passed on every rank


class RankFence:
    """A pytest plugin that holds the ranks together."""

    def __init__(self, world):
        self.comm = world.Dup()  # no test can reach it
        self.peers = self.comm.allgather((platform.node(), os.getpid()))
        self.stderr = os.dup(2)  # the true one: pytest captures 2 during a test
        self.failures = []  # rank 0 prints them at the end, which an aborted job never reaches
        self.collection_errors = []
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # holds while the rank is at the fence
        faulthandler.register(STACK_SIGNAL, file=self.stderr)

    def agree(self, where, outcome, text=""):
        """Return the (outcome, text) of every rank; end the job when the ranks are not together."""
        faulthandler.unregister(STACK_SIGNAL)
        deadline, pause = time.monotonic() + FENCE_SECONDS, 50e-6
        arrived = self.comm.Ibarrier()
        while not arrived.Test():
            if time.monotonic() > deadline:
                self.give_up(where, outcome, text)
            time.sleep(pause)  # not a busy wait: the ranks may outnumber the cores
            pause = min(2 * pause, 5e-4)
        ranks = self.comm.allgather((where, outcome, text))
        if len({place for place, _, _ in ranks}) > 1:
            places = [f"rank {r}: {place}\n{text}" for r, (place, _, text) in enumerate(ranks)]
            if self.comm.rank == 0:
                self.tell("\n".join(["the ranks are at different places", *places]))
                self.abort()
            time.sleep(FENCE_SECONDS)  # rank 0 ends the job
        faulthandler.register(STACK_SIGNAL, file=self.stderr)
        return [(outcome, text) for _, outcome, text in ranks]

    def give_up(self, where, outcome, text):
        time.sleep(self.comm.rank)  # of the ranks that arrived the lowest speaks, and ends all
        self.tell(
            f"{where}: {outcome} here, but another rank is still inside it after"
            f" {FENCE_SECONDS:g} s: it waits in a call that this rank did not join.\n{text}"
        )
        host = self.peers[self.comm.rank][0]
        for rank, (other_host, pid) in enumerate(self.peers):
            if rank != self.comm.rank and other_host == host:
                self.tell(f"where rank {rank} is (nothing follows for a rank that waits here):")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
                time.sleep(0.2)  # for the stack, before the next one begins
        self.abort()

    def abort(self):
        for failure in self.failures:
            self.tell(f"failed earlier: {failure}")
        time.sleep(0.5)  # for the launcher, which forwards what the ranks wrote
        self.comm.Abort(1)

    def tell(self, text):
        head = f"[rank {self.comm.rank} of {self.comm.size}]"
        os.write(self.stderr, f"\n{head} {text}\n".encode())

    def pytest_collectreport(self, report):
        if report.failed:
            self.collection_errors.append(report.longreprtext)

    @pytest.hookimpl(trylast=True)  # after plugins that deselect or reorder
    def pytest_collection_finish(self, session):
        found = [item.nodeid for item in session.items]
        errors = self.collection_errors
        ranks = self.agree("collection", (found, len(errors)), "\n".join(errors))
        if any(outcome != ranks[0][0] for outcome, _ in ranks):
            texts = [
                f"rank {rank}: {len(names)} tests, {errors} errors. {text}"
                for rank, ((names, errors), text) in enumerate(ranks)
            ]
            pytest.exit("\n".join(["the ranks collected different tests", *texts]), returncode=2)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: an xfail mark has had its say
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.passed and call.when != "call":
            # Not worth a meeting: a rank whose setup or teardown failed comes to the fence alone,
            # and the others meet it there, at another place.
            return report
        where = f"{item.nodeid} ({call.when})"
        text = "" if report.passed else report.longreprtext
        if report.failed and self.comm.rank > 0:  # rank 0's reporter adds its own sections
            text += "".join(f"\n--- {name}\n{content}" for name, content in report.sections)
        ranks = self.agree(where, report.outcome, text)
        outcomes = [outcome for outcome, _ in ranks]
        if "failed" in outcomes or len(set(outcomes)) > 1:
            report.outcome = "failed"
            head = ", ".join(f"rank {rank} {outcome}" for rank, outcome in enumerate(outcomes))
            texts = [f"--- rank {rank}\n{text}" for rank, (_, text) in enumerate(ranks) if text]
            report.longrepr = "\n\n".join([head, *texts])
            self.failures.append(f"{where}: {report.longrepr}")
        if call.when == "call":
            item.stash[PASSED] = report.passed
        return report

    def pytest_unconfigure(self):
        self.agree("end of session", "done")  # rank 0 has printed its report
        self.comm.Free()
