"""Going on without a lost rank: its replicas move, and the work goes on at the last commit."""

from .losses import Loss
from .state import ElasticState

__all__ = ["ElasticState", "Loss"]
