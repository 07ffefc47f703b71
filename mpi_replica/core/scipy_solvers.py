"""Solvers of scipy that keep their state for the thread while they call functions of the program.

Where replicas share a thread, each goes on with the state of the one that began last: MINPACK's
pointers to what it calls, the common blocks of ODEPACK, the callbacks of f2py (scipy 1.17: wrong
results without a word, "DVODE callback not initialized", or a segmentation fault). Its other ones
(``quad``, ``brentq``, L-BFGS-B, ARPACK) hold it in the call.
"""

from __future__ import annotations

import os
from types import CodeType

# By the file in scipy, and the function in it that calls the solver.
_NAMES = {
    ("integrate", "_odepack_py.py", "odeint"): "scipy.integrate.odeint",
    ("integrate", "_ode.py", "run"): "scipy.integrate.ode, or the LSODA of solve_ivp",
    ("optimize", "_minpack_py.py", "leastsq"): "scipy.optimize.leastsq, or the lm of another one",
    ("optimize", "_minpack_py.py", "_root_hybr"): "scipy.optimize.fsolve, or the hybr of root",
    ("_lsq", "least_squares.py", "call_minpack"): "scipy.optimize.least_squares with lm",
}


def solver_of(code: CodeType) -> str:
    """Returns the words for the solver that this code of scipy calls; empty where it is none."""
    folder, file = os.path.split(code.co_filename)
    if "scipy" not in folder.split(os.sep):
        return ""
    return _NAMES.get((os.path.basename(folder), file, code.co_name), "")
