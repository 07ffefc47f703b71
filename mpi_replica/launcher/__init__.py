"""Starting a program on several ranks: the library's own launcher, told what it needs."""

from .job import Job, Options, plan, start

__all__ = ["Job", "Options", "plan", "start"]
