"""The hooks that hold the ranks of a pytest run together, and have one of them report."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from ..core.exceptions import MPIReplicaError, RankLostError, add_note
from ..strategy import job_end
from .arrivals import (
    FAILED,
    PASSED,
    STOPPED,
    XFAILED,
    Arrival,
    failure,
    judge,
    kind_of,
    places_apart,
    waited_at,
)
from .collected_tests import different_tests, in_order
from .fence import Fence, RanksMissingError
from .recorded_warnings import RecordedWarning, warnings_of_others
from .report_texts import captured, reason_of, summary_of, text_of

#: Of a test: whether its body passed, on every rank.
BODY_PASSED = pytest.StashKey[bool]()

# What a rank tells that waits for the others to make the strategy of a test with it.
_FOR_STRATEGY = "the fixture `strategy`"

# Of a rank; a summary shows each once.
_MOST_WARNINGS = 1000

_INTERRUPTED = int(pytest.ExitCode.INTERRUPTED)


def quieten(config: pytest.Config, rank: int) -> None:
    """Keeps a rank beside rank 0 from writing reports, and files that rank 0 writes, too.

    It must be called before plugins open these files.
    """
    option = config.option
    for name in ("xmlpath", "htmlpath", "report_log", "json_report_file", "pastebin"):
        if getattr(option, name, None) is not None:
            setattr(option, name, None)
    option.log_file = os.devnull
    if option.basetemp is not None:
        option.basetemp = f"{option.basetemp}-rank-{rank}"


class _Nowhere(io.TextIOBase):
    """Where a rank writes that does not report."""

    def write(self, text: str) -> int:
        return len(text)


class RankFence:
    """A pytest plugin for a run on several ranks.

    Parameters
    ----------
    fence : Fence
        Where the ranks meet.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        #: How long ranks wait for each other.
        self.limit_seconds = fence.limit_seconds
        #: Of what this rank can't collect, by its name: the text, and the error in one line.
        self._collection_errors: dict[str, tuple[str, str]] = {}
        #: Why this rank does not collect a module.
        self._skipped_modules: list[str] = []
        #: In which part of a test its functions run: fixtures of it, or its body.
        self._part = ""
        self._failed_subtests: list[str] = []
        #: Why the session ends early on this rank.
        self._reason = ""
        self._warnings: list[RecordedWarning] = []
        #: What rank 0 prints at the end, of other ranks.
        self._remarks: list[str] = []

    def pytest_report_header(self) -> str:
        return (
            f"mpi_replica: {self._fence.size} ranks, which wait {self._fence.limit_seconds:g} s"
            " for each other (MPI_REPLICA_TEST_FENCE)"
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if self._fence.rank == 0:
            return
        config = session.config
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:  # others may look for it, so it stays
            reporter._tw._file = _Nowhere()
        cache = getattr(config, "cache", None)
        if cache is not None:  # of last failures and so on: all ranks have the same
            cache.set = lambda key, value: None

    # Collection

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        self._fence.do("collection")
        with self._noting_the_end():
            return (yield)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collection_errors[report.nodeid] = report.longreprtext, summary_of(report)
        elif report.skipped:
            reason = reason_of(report)[1].removeprefix("Skipped: ")
            self._skipped_modules.append(f"{report.nodeid}: {reason}")

    @pytest.hookimpl(trylast=True)  # after plugins that deselect or reorder
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if sys.exception() is not None:  # it ends the session, where the others hear of it
            return
        names = [item.nodeid for item in session.items]
        errors = dict(self._collection_errors)
        kind, text = FAILED if errors else PASSED, "\n\n".join(text for text, _ in errors.values())
        detail = names, errors, self._skipped_modules
        arrivals = self._meet_or_exit(Arrival("collection", kind, text, detail=detail))
        for rank, arrival in enumerate(arrivals):
            for nodeid, (text, error) in arrival.detail[1].items():
                if nodeid not in self._collection_errors:
                    self._fail_collection(session, nodeid, f"on rank {rank}: {error}\n{text}")
        lists = [arrival.detail[0] for arrival in arrivals]
        if any(sorted(names) != sorted(lists[0]) for names in lists):
            if not any(arrival.detail[1] for arrival in arrivals):
                skipped = [arrival.detail[2] for arrival in arrivals]
                self._fail_collection(session, "", different_tests(lists, skipped))
            session.items.clear()
        elif names != lists[0]:  # a plugin has shuffled them: the order of rank 0 holds
            session.items[:] = in_order(session.items, lists[0])

    def _fail_collection(self, session: pytest.Session, nodeid: str, text: str) -> None:
        report = pytest.CollectReport(nodeid, "failed", text, [])
        session.config.hook.pytest_collectreport(report=report)

    # Tests

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        self._fence.do("the run of the tests")
        with self._noting_the_end():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._meet_or_exit(Arrival(f"{item.nodeid} (start)"))
        self._fence.do(item.nodeid)
        self._fence.departure.begin_test()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        known = job_end.engines()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self._fence.departure.keep(known)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        return (yield from self._in("setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        return (yield from self._in("call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        return (yield from self._in("teardown"))

    def _in(self, part: str) -> Generator[None, object, object]:
        self._failed_subtests.clear()
        self._part = part
        try:
            return (yield)
        finally:
            self._part = ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: an xfail mark has had its say
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if self._part:  # of a subtest: the ranks need not have the same ones
            if report.failed:
                self._failed_subtests.append(text_of(report))
            return report
        place = f"{item.nodeid} ({call.when})"
        try:
            arrivals = self._meet_at_end_of_part(self._arrival(place, report, call))
            self._apply(arrivals, report)
        except RanksMissingError as error:
            _set_failed(report, str(error))
            item.session.shouldstop = "some ranks did not come"
        if call.when == "call":
            item.stash[BODY_PASSED] = report.passed and not self._failed_subtests
        if report.failed:
            self._fence.failures.append(f"{place}: {report.longrepr}")
        return report

    def come_to_strategy(self, item: pytest.Item) -> None:
        """Waits for the others, before all ranks make the strategy of a test.

        Raises
        ------
        RankLostError
            Not all ranks come to it: one has failed before, or skips the test.
        """
        place = f"{item.nodeid} ({self._part or 'setup'})"
        arrivals = self._meet_or_exit(Arrival(place, detail=_FOR_STRATEGY))
        if any(arrival.detail != _FOR_STRATEGY for arrival in arrivals):
            error = RankLostError(f"not all ranks have come to {_FOR_STRATEGY}")
            add_note(error, f"waits in {_FOR_STRATEGY}")
            raise error

    def _meet_at_end_of_part(self, mine: Arrival) -> list[Arrival]:
        """Meets until all ranks are at the end; those before a strategy learn that this one is."""
        while True:
            arrivals = self._meet(mine)
            if all(arrival.detail is None for arrival in arrivals):
                return arrivals

    def _arrival(
        self, place: str, report: pytest.TestReport, call: pytest.CallInfo[None]
    ) -> Arrival:
        error = call.excinfo.value if call.excinfo is not None else None
        kind, text, summary = kind_of(report, error), "", ""
        if kind == XFAILED:
            text = summary = report.wasxfail
        elif report.failed:
            text = text_of(report) if self._fence.rank else report.longreprtext
            summary = summary_of(report)
        elif self._failed_subtests:  # also where the part skips behind them
            kind, text = FAILED, "\n\n".join(self._failed_subtests)
            summary = f"failed subtests: {len(self._failed_subtests)}"
        elif report.skipped:
            text, summary = reason_of(report)
        return Arrival(place, kind, text, summary, waited_at(error) if kind == STOPPED else "")

    def _apply(self, arrivals: Sequence[Arrival], report: pytest.TestReport) -> None:
        """Makes the outcome of all ranks the one of this rank."""
        kind = judge(arrivals)
        if kind == FAILED:
            outputs = self._outputs(arrivals, report)
            texts = {(arrival.kind, arrival.text) for arrival in arrivals}
            if len(texts) > 1 or not report.failed:
                own = report.longrepr if report.failed else None
                path, line, _ = report.location
                place = path, (line or 0) + 1
                _set_failed(report, failure(arrivals, self._fence.rank, own, outputs, place))
        elif kind == XFAILED:
            report.outcome = "skipped"
            expected = next(arrival for arrival in arrivals if arrival.kind == XFAILED)
            report.wasxfail = expected.text
            report.longrepr = expected.text

    def _outputs(self, arrivals: Sequence[Arrival], report: pytest.TestReport) -> list[str]:
        """Returns what was captured on each rank that has not failed, whose text does not have it.

        Collective, where there is one: a test that passes costs no message for what it prints.
        """
        mine = arrivals[self._fence.rank]
        if all(arrival.kind == FAILED for arrival in arrivals):
            return [""] * len(arrivals)
        output = "" if mine.kind == FAILED else captured(report).strip()
        place = f"what was captured in {mine.place}"
        return [other.detail for other in self._meet(Arrival(place, detail=output))]

    # The end

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, nodeid: str
    ) -> None:
        self._warnings.append(RecordedWarning.of(warning_message, nodeid))

    def pytest_internalerror(
        self, excrepr: object, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> None:
        if not isinstance(excinfo.value, SystemExit):  # which says all in its text
            self._reason = f"INTERNALERROR: {excrepr}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._remarks:
            terminalreporter.section("other ranks", red=True)
            for remark in self._remarks:
                terminalreporter.line(remark)

    # Before the fixtures that are left are torn down, and within what reports then.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int
    ) -> Generator[None, object, object]:
        self._meet_before_last_teardown(session, exitstatus)
        try:
            return (yield)
        except (MPIReplicaError, ExceptionGroup) as group:
            errors = [*_single(group)]
            is_apart = bool(self._reason or self._remarks)
            if not is_apart or not all([isinstance(one, MPIReplicaError) for one in errors]):
                raise
            # Strategies are given up, since the ranks are apart: the report comes all the same.
            for error in errors:
                self._remarks.append(f"fixtures at the end: {type(error).__name__}: {error}")
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
            return None

    def _meet_before_last_teardown(self, session: pytest.Session, exitstatus: int) -> None:
        self._fence.do("the end of the session")
        mine = Arrival(
            "the end of the session",
            text=self._reason,
            stage=1,
            status=int(exitstatus),
            detail=self._warnings[:_MOST_WARNINGS],
        )
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        try:
            arrivals = self._meet_the_end(mine)
            if reporter is not None:
                # One that is further on, behind an error of pytest's own, tells none.
                of_ranks = [other.detail or () for other in arrivals]
                for warning, nodeid in warnings_of_others(of_ranks):
                    reporter.pytest_warning_recorded(warning, nodeid)
            for rank, arrival in enumerate(arrivals):
                if arrival.text and not self._reason:
                    self._remarks.append(f"rank {rank}: {arrival.text}")
                    session.exitstatus = session.exitstatus or arrival.status
        except RanksMissingError as error:
            self._remarks.append(str(error))
        if self._fence.was_interrupted:
            self._fence.say("Ctrl-C at the end of the session")
            session.exitstatus = pytest.ExitCode.INTERRUPTED

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # ends behind those that raise, too
    def pytest_unconfigure(self) -> Generator[None, object, object]:
        self._fence.do("the end of pytest")
        try:
            with self._noting_the_end():
                return (yield)
        finally:
            try:
                self._meet_the_end(Arrival("the end of pytest", text=self._reason, stage=2))
            except RanksMissingError as error:
                self._fence.say(str(error))
            self._fence.close()

    def _meet_the_end(self, mine: Arrival) -> list[Arrival]:
        """Meets until all ranks are as near to the end; the others learn that this one is."""
        while True:
            arrivals = self._fence.meet(mine)
            if all(arrival.stage >= mine.stage for arrival in arrivals):
                return arrivals

    @contextmanager
    def _noting_the_end(self) -> Generator[None, None, None]:
        try:
            yield
        except BaseException as error:
            self._reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise

    def _meet_or_exit(self, mine: Arrival) -> list[Arrival]:
        try:
            return self._meet(mine)
        except RanksMissingError as error:
            pytest.exit(str(error), returncode=1)

    def _meet(self, mine: Arrival) -> list[Arrival]:
        """Meets the other ranks before the end; where they are elsewhere, ends the session."""
        arrivals = self._fence.meet(mine)
        if apart := places_apart(arrivals):
            status = max(arrival.status for arrival in arrivals)
            pytest.exit(apart, returncode=status or _INTERRUPTED)
        return arrivals


def _single(error: BaseException) -> Iterator[BaseException]:
    """Yields the errors of a group, of which some may be groups, or an error that is none."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _single(one)
    else:
        yield error


def _set_failed(report: pytest.TestReport, longrepr: Any) -> None:
    report.outcome = "failed"
    report.longrepr = longrepr
    report.__dict__.pop("wasxfail", None)
