"""Which hosts of a job still answer: each one is asked to remove what dead processes have left."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from .leftovers import ANSWER
from .processes import descendants, send_signal

# A launcher that has to be ended leaves files on the host.
_SECONDS_TO_END = 2.0
_READ_BYTES = 1 << 12


class HostQuestions:
    """Questions to all hosts at once.

    Parameters
    ----------
    selector : BaseSelector
        Gets what is answered.
    questions : mapping
        The command for each host.
    environ : mapping
        The environment variables of the commands.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        questions: Mapping[str, Sequence[str]],
        environ: Mapping[str, str],
    ) -> None:
        #: The hosts that have answered.
        self.answered: set[str] = set()
        #: Those that have, and whose launcher has not ended by itself.
        self.unfinished: set[str] = set()
        self._answered_at = 0.0
        self._selector = selector
        self._asked = {
            host: subprocess.Popen(
                words,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
            for host, words in questions.items()
        }
        self._texts = dict.fromkeys(questions, b"")
        # What may still be written, by host.
        self._open = {host: asked.stdout for host, asked in self._asked.items() if asked.stdout}
        for host, pipe in self._open.items():
            selector.register(pipe, selectors.EVENT_READ, lambda host=host: self._read(host))

    def _read(self, host: str) -> None:
        data = os.read(self._open[host].fileno(), _READ_BYTES)
        self._texts[host] += data
        if ANSWER.encode() in self._texts[host]:
            self.answered.add(host)
            self._answered_at = time.monotonic()
        if not data:
            self._close(host)

    def _close(self, host: str) -> None:
        pipe = self._open.pop(host)
        self._selector.unregister(pipe)
        pipe.close()

    @property
    def are_open(self) -> bool:
        """Whether a host may still answer, or its launcher end by itself."""
        is_ending = time.monotonic() < self._answered_at + _SECONDS_TO_END
        return bool(self._open if is_ending else self._open.keys() - self.answered)

    def close(self) -> None:
        """Ends what was started: with a host that is silent it would wait."""
        self.unfinished = self._open.keys() & self.answered
        for asked in self._asked.values():
            for pid in [*descendants(asked.pid), asked.pid]:  # ssh would stay behind
                send_signal(pid, signal.SIGKILL)
            asked.wait()
        for host in list(self._open):
            self._close(host)
