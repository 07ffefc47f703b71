"""Who waits where: a thread that watches, reports of stalls, and a record of the last calls."""

from .channel import Channel
from .watcher import watcher

__all__ = ["Channel", "watcher"]
