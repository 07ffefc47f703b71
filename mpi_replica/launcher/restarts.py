"""Whether a job is started again that has ended by a loss."""

from __future__ import annotations

from typing import NamedTuple

_DEFAULT = 3
# A job that lives no longer has done nothing; so often in a row it is given up.
_SECONDS_OF_QUICK_DEATH = 10.0
_MOST_QUICK_DEATHS = 3
# A program that has not even imported the package after this time works without it.
_SECONDS_TO_IMPORT = 60.0
_LONGEST_PAUSE_SECONDS = 30.0


class Outcome(NamedTuple):
    """What came of one start of a job."""

    #: The exit status of the job, if it ends with it.
    status: int
    seconds: float
    #: Which rank was lost; empty where the program itself has ended.
    loss: str = ""
    #: Whether it was told to end, by a signal or after its time.
    is_final: bool = False
    #: Whether a rank has imported the package; the replicas of its strategy, where it has made one.
    has_package: bool = False
    num_replicas: int | None = None
    #: Whether the program goes on from its last checkpoint, where there is one.
    goes_on: bool = False


class Restarts:
    """Counts the starts of a job, and says whether there is one more.

    Parameters
    ----------
    most : int, optional
        How often the job may be started again. Default: 3, where that repeats little: nothing was
        done before the loss, or the program goes on from checkpoints.
    after_errors : bool
        Whether it is, too, where the program has ended by an error of its own.
    """

    def __init__(self, most: int | None = None, after_errors: bool = False) -> None:
        self._most = most
        self._after_errors = after_errors
        #: How often the job was started again.
        self.count = 0
        # Of the starts that came to a quick end, since the last one that did not.
        self._causes: list[str] = []

    def pause_seconds(self, outcome: Outcome) -> tuple[float | None, str]:
        """Returns after how many seconds the job is started again, None if not, and a text on it.

        Examples
        --------
        >>> Restarts().pause_seconds(Outcome(137, 60.0, "rank 2 was lost", goes_on=True))
        (1.0, 'rank 2 was lost. Start 2 of at most 4 follows in 1 s.')
        >>> Restarts().pause_seconds(Outcome(1, 60.0))
        (None, '')
        """
        cause = outcome.loss
        if not cause and self._after_errors:
            cause = f"the program has ended with status {outcome.status}"
        if outcome.status == 0 or outcome.is_final or not cause:
            return None, ""
        self._causes = [*self._causes, cause] * (outcome.seconds < _SECONDS_OF_QUICK_DEATH)
        repeats_little = outcome.goes_on or (
            outcome.num_replicas is None
            and (outcome.has_package or outcome.seconds < _SECONDS_TO_IMPORT)
        )
        if self._most is None and not repeats_little:
            return None, (
                f"{cause}. The job is not started again: what it has done would be done twice."
                " Save checkpoints and begin with CheckpointManager.restore_or_initialize, or ask"
                " for --restarts N."
            )
        most = _DEFAULT if self._most is None else self._most
        if len(self._causes) >= _MOST_QUICK_DEATHS:
            causes = "".join(f"\n  {number}. {text}" for number, text in enumerate(self._causes, 1))
            return None, (
                f"the job is given up: {len(self._causes)} times in a row it has died within"
                f" {_SECONDS_OF_QUICK_DEATH:g} s of its start.{causes}"
            )
        if self.count >= most:
            used = f" It was started {most + 1} times (--restarts {most})." if most else ""
            return None, f"{cause}.{used}"
        seconds = min(2.0**self.count, _LONGEST_PAUSE_SECONDS)
        self.count += 1
        return seconds, (
            f"{cause}. Start {self.count + 1} of at most {most + 1} follows in {seconds:g} s."
        )
