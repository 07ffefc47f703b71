"""Starting a program on several ranks: the library's own launcher, told what it needs."""

from .allocation import read_allocation
from .elasticity import RANKS_LOST
from .job import Job, Options, plan, start
from .library import find_launcher, find_library

__all__ = [
    "RANKS_LOST",
    "Job",
    "Options",
    "find_launcher",
    "find_library",
    "plan",
    "read_allocation",
    "start",
]
