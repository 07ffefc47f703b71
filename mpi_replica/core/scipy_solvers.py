"""Solvers of scipy in which several replicas of a thread, or of a rank, can't be at once.

Some keep their state for the thread while they call functions of the program. Where replicas share
one, each goes on with the state of the one that began last: MINPACK's pointers to what it calls,
the common blocks of ODEPACK, the callbacks of f2py (scipy 1.17: wrong results without a word,
"DVODE callback not initialized", or a segmentation fault). COBYQA holds a lock of the process. Its
other ones (``quad``, ``brentq``, L-BFGS-B, ARPACK) have their state in the call. ``odr`` holds a
lock, too, but loses memory where what it calls raises (1.17): a stall report tells of that wait.
"""

from __future__ import annotations

import os
from types import CodeType
from typing import NamedTuple


class Solver(NamedTuple):
    """One that calls functions of the program."""

    name: str
    #: Whether it holds a lock meanwhile; it keeps its state for the thread otherwise.
    holds_lock: bool = False


# By the file in scipy, and the function in it that calls the solver.
_SOLVERS = {
    ("integrate", "_odepack_py.py", "odeint"): Solver("integrate.odeint"),
    ("integrate", "_ode.py", "run"): Solver("integrate.ode, or the LSODA of solve_ivp"),
    ("optimize", "_minpack_py.py", "leastsq"): Solver("optimize.leastsq, or the lm of another one"),
    ("optimize", "_minpack_py.py", "_root_hybr"): Solver("optimize.fsolve, or the hybr of root"),
    ("_lsq", "least_squares.py", "call_minpack"): Solver("optimize.least_squares with lm"),
    ("optimize", "_cobyqa_py.py", "_minimize_cobyqa"): Solver("optimize.minimize, COBYQA", True),
}


def solver_of(code: CodeType) -> Solver | None:
    """Returns the solver that this code of scipy calls, if it calls one of these."""
    folder, file = os.path.split(code.co_filename)
    if "scipy" not in folder.split(os.sep):
        return None
    return _SOLVERS.get((os.path.basename(folder), file, code.co_name))
