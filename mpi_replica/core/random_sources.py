"""Whatever random numbers are drawn from, of numpy, Python or torch: where it stands."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from .imported_libraries import imported_library
from .randomness import state_of


def state_of_source(source: Any) -> Any:
    """Returns where a generator, or what one is made of, stands; None for anything else."""
    if isinstance(source, np.random.Generator):
        return state_of(source)
    if isinstance(source, np.random.RandomState):
        return source.get_state(legacy=False)
    if isinstance(source, np.random.BitGenerator):
        return source.state
    if isinstance(source, np.random.SeedSequence):
        return source.n_children_spawned
    if isinstance(source, random.Random):
        try:
            return source.getstate()
        except NotImplementedError:  # as of one that the system draws for
            return None
    torch = imported_library("torch")
    if torch is not None and isinstance(source, torch.Generator):
        return source.get_state().numpy()
    return None


def is_source(value: Any) -> bool:
    """Returns whether random numbers are drawn from `value`, and the draws can be seen."""
    return state_of_source(value) is not None
