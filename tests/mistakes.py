"""Mistakes that a program can catch, as data: what one replica does wrong, and what all ranks get.

A mistake is made by one replica in a step, or by the rank that hosts it outside of one; all other
replicas do what is right. Every rank must get the same error from `Mistake.make`, and the strategy
works on. Nothing here needs pytest.
"""

import mistakes_in_calls
import mistakes_in_out
import mistakes_of_ranks
import mistakes_that_raise
from mistake import Mistake

__all__ = ["MISTAKES", "Mistake"]

MISTAKES = (
    *mistakes_in_calls.TABLE,
    *mistakes_in_out.TABLE,
    *mistakes_that_raise.TABLE,
    *mistakes_of_ranks.TABLE,
)
