"""What pytest's report of a test says, as other ranks are told of it."""

from __future__ import annotations

import pytest


def text_of(report: pytest.TestReport) -> str:
    """Returns the traceback and what was captured."""
    return report.longreprtext + captured(report)


def captured(report: pytest.TestReport) -> str:
    """Returns what was captured, with the names of its parts."""
    return "".join([f"\n--- {name}\n{content}" for name, content in report.sections])


def summary_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the error in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).partition("\n")[0]
    return report.longreprtext.strip().rpartition("\n")[2].removeprefix("E").lstrip()


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str]:
    """Returns why a test or a module was skipped, with the line and without."""
    if not isinstance(report.longrepr, tuple):
        return report.longreprtext, report.longreprtext
    path, line, reason = report.longrepr
    return f"{path}:{line}: {reason}", reason
