"""What each op does with two contributions, by numpy."""

from __future__ import annotations

import numpy as np

from .options import ReduceOp

#: What combines two contributions.
UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}

#: Of these the order of contributions makes no difference.
EXTREMES = frozenset({ReduceOp.MIN, ReduceOp.MAX})
