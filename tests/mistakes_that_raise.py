"""Mistakes of one replica in a step: it raises, and the others wait for it."""

import itertools
import os
import signal
import sys

import numpy as np

import mpi_replica as mr
from mistake import CALL, LARGE, MEDIUM, Table

TABLE = Table()

RAISED = "raised by {replica} at mistakes_that_raise.py:"


class Lost(Exception):
    """An exception with more than one argument."""

    def __init__(self, code, table):
        super().__init__(code, table)


class Unpicklable(Exception):
    """Made of something that can't be pickled."""

    def __init__(self, text):
        super().__init__(text, lambda: None)

    def __str__(self):
        return "can't be pickled"


class Unloadable(Exception):
    """Can be pickled, but not loaded by pickle: its constructor wants other arguments."""

    def __init__(self, left, right):
        super().__init__(f"{left} and {right}")


class Endless:
    """An object that becomes an array in the call that it is given to."""

    def __array__(self, dtype=None, copy=None):
        return np.broadcast_to(1.0, 1 << 44).copy()  # 128 TiB


@TABLE.mistake(Lost, RAISED)
def raises_before_all_collectives(context, is_culprit):
    if is_culprit:
        raise Lost(2, {"a": [1]})  # told
    context.all_reduce("SUM", np.ones(LARGE))


@TABLE.mistake(Lost, RAISED)
def raises_between_collectives(context, is_culprit):
    context.all_reduce("SUM", np.ones(MEDIUM))
    if is_culprit:
        raise Lost(2, {"a": [1]})  # told
    context.all_gather(np.ones(MEDIUM), axis=0)


@TABLE.mistake(Lost, RAISED)
def raises_after_all_collectives(context, is_culprit):
    context.all_reduce("SUM", 1.0)
    if is_culprit:
        raise Lost(2, {"a": [1]})  # told


@TABLE.mistake(Lost, RAISED)
def raises_without_a_collective(context, is_culprit):
    if is_culprit:
        raise Lost(2, {"a": [1]})  # told


@TABLE.mistake(ZeroDivisionError, RAISED)
def raises_in_a_generator(context, is_culprit):
    def rows():
        yield 1
        yield 1 // (not is_culprit)  # told

    return [context.all_reduce("SUM", row) for row in rows()]


@TABLE.mistake(LookupError, "raised by replica 0 (rank 0) at mistakes_that_raise.py:")
def two_raise_different_ones(context, is_culprit):
    context.all_reduce("SUM", 1.0)
    raise (KeyError if is_culprit else IndexError)(context.replica_id_in_sync_group)


@TABLE.mistake(SystemExit, RAISED)
def exits(context, is_culprit):
    context.all_reduce("SUM", 1.0)
    if is_culprit:
        sys.exit(3)  # told
    context.all_reduce("SUM", np.ones(LARGE))


@TABLE.mistake(KeyboardInterrupt, RAISED)
def raises_an_interrupt(context, is_culprit):
    if is_culprit:
        raise KeyboardInterrupt  # told
    context.all_gather(np.ones(2), axis=0)


@TABLE.mistake(KeyboardInterrupt, RAISED)
def is_interrupted(context, is_culprit):
    context.all_reduce("SUM", 1.0)
    if is_culprit:
        # Signal 0 is none. A replica in a thread of its own gets what the main thread got, soon.
        numbers = itertools.chain([signal.SIGINT], itertools.repeat(0))
        [os.kill(os.getpid(), number) for number in numbers]  # told
    context.all_reduce("SUM", 1.0)


@TABLE.mistake(Unpicklable, RAISED, elsewhere=mr.errors.RemoteReplicaError)
def raises_what_can_not_be_pickled(context, is_culprit):
    if is_culprit:
        raise Unpicklable("open file")  # told
    context.all_reduce("SUM", 1.0)


@TABLE.mistake(Unloadable, RAISED)
def raises_what_pickle_can_not_load(context, is_culprit):
    context.all_reduce("SUM", 1.0)
    if is_culprit:
        raise Unloadable("left", "right")  # told
    context.all_reduce("SUM", 1.0)


@TABLE.mistake(TypeError, "raised by replica", "at mistakes_that_raise.py:")
def passes_what_merge_fn_chokes_on(context, is_culprit):
    def merge_fn(strategy, rows):
        return sum(rows.values)  # told

    return context.merge_call(merge_fn, (None if is_culprit else 1,))


@TABLE.mistake(MemoryError, "Unable to allocate", ends_the_run=False)
def has_no_memory_for_all_reduce(context, is_culprit):
    return context.all_reduce("SUM", Endless() if is_culprit else np.ones(MEDIUM))


@TABLE.mistake(MemoryError, "Unable to allocate", ends_the_run=False)
def has_no_memory_for_all_gather(context, is_culprit):
    endless = np.broadcast_to(1.0, 1 << 44)
    return context.all_gather(endless if is_culprit else np.ones(MEDIUM), axis=0)


@TABLE.mistake(ValueError, "one of them contains itself", ends_the_run=False)
def reduces_a_list_that_contains_itself(context, is_culprit):
    rows = [1.0]
    if is_culprit:
        rows.append(rows)
    return context.all_reduce("SUM", rows)


@TABLE.mistake(CALL, "while ValueError: no rows is handled", ends_the_run=True)
def raises_and_calls_in_finally(context, is_culprit):
    try:
        if is_culprit:
            raise ValueError("no rows")
        context.all_reduce("MAX", 1.0)  # told
    finally:
        context.all_reduce("SUM", 1.0)  # told


@TABLE.mistake(CALL, "returned", "while ValueError: no rows is handled", ends_the_run=True)
def calls_where_an_exception_is_handled(context, is_culprit):
    try:
        if is_culprit:
            raise ValueError("no rows")
    except ValueError:
        context.all_reduce("SUM", 1.0)  # told


# What the others do when they are stopped at their calls does not count (DESIGN.md decision 17)


@TABLE.mistake(Lost, RAISED)
def others_clean_up(context, is_culprit):
    if is_culprit:
        raise Lost(2, {"a": [1]})  # told
    try:
        context.all_reduce("SUM", 1.0)
    finally:
        context.all_gather(np.ones(MEDIUM), axis=0)


@TABLE.mistake(Lost, RAISED)
def others_catch_exception(context, is_culprit):
    context.all_reduce("SUM", 1.0)
    if is_culprit:
        raise Lost(2, {"a": [1]})  # told
    try:
        context.all_reduce("SUM", 1.0)
    except Exception:  # what comes is none
        return "as if nothing had happened"


@TABLE.mistake(Lost, RAISED)
def others_catch_everything(context, is_culprit):
    context.all_reduce("SUM", np.ones(LARGE))
    if is_culprit:
        raise Lost(2, {"a": [1]})  # told
    for _ in range(3):
        try:
            context.all_reduce("SUM", np.ones(LARGE))
        except BaseException:
            pass
    return "as if nothing had happened"
