"""What a mistake is, as data, and how tables of them are made (see mistakes.py)."""

import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import mpi_replica as mr

# Numbers of float64 items that travel in a header, that share a pack, and that stream in pieces.
INLINE, MEDIUM, LARGE = 4, 1000, 300_000

STRUCTURE, CALL = mr.errors.StructureMismatchError, mr.errors.CollectiveMismatchError


class Mistake(NamedTuple):
    """What one replica does wrong."""

    name: str
    #: What every rank must raise.
    error: type[BaseException]
    #: What the text, or a note, must hold. "{replica}" stands for the one, as "replica 3 (rank 1)",
    #: and "{replicas}" for all of its rank.
    words: tuple[str, ...]
    #: The lines that it must name, as "mistakes.py:41".
    places: tuple[str, ...]
    #: In a step: called by each replica, with its context and whether it is the one.
    in_a_step: Callable[[Any, bool], Any] | None = None
    #: Outside of a step: called by each rank, with the strategy and the id of the replica. It
    #: takes two ranks; in a step two replicas will do.
    outside: Callable[[Any, int], Any] | None = None
    #: Whether all replicas can catch it at their calls, and go on with the step. Otherwise it ends
    #: the run.
    ends_the_run: bool = True
    #: Whether the text names who is on which side: in a step the replica and the others, outside
    #: those of its rank and the others.
    names_both_sides: bool = False
    #: What the ranks raise that the error can't travel to.
    elsewhere: type[BaseException] | None = None

    def make(self, strategy, culprit):
        """Let replica `culprit` make the mistake. Collective; every rank raises."""
        if self.outside is not None:
            return self.outside(strategy, culprit)

        def step():
            context = mr.get_replica_context()
            return self.in_a_step(context, context.replica_id_in_sync_group == culprit)

        return strategy.run(step)


class Table(list):
    """Mistakes in the order in which they are written down.

    The lines that the error must name are marked with a comment, "told".
    """

    def mistake(self, error, *words, **settings):
        """Return a decorator: the function is a mistake, under its own name."""

        def register(function):
            self.add(function.__name__.replace("_", " "), error, words, function, **settings)
            return function

        return register

    def mistake_at_each_size(self, error, *words):
        """Return a decorator: what the function makes of a number of items is a mistake."""

        def register(make):
            for size, label in ((INLINE, ""), (MEDIUM, ", medium"), (LARGE, ", large")):
                name = make.__name__.replace("_", " ") + label
                self.add(name, error, words, make(size), told_in=make)
            return make

        return register

    def add(self, name, error, words, function, *, outside=False, told_in=None, **settings):
        settings["outside" if outside else "in_a_step"] = function
        if error in (STRUCTURE, CALL):
            settings = {"names_both_sides": True, "ends_the_run": outside, **settings}
        file = os.path.basename(inspect.getsourcefile(function))
        lines, first = inspect.getsourcelines(told_in or function)
        places = tuple(f"{file}:{first + i}" for i, line in enumerate(lines) if "# told" in line)
        self.append(Mistake(name, error, words, places, **settings))
