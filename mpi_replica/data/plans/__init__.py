"""What the verbs of a dataset do: which position of the source, in which epoch.

Where rows can be reached by position (`indexable`) a verb only computes positions, and the source
reads last: nothing is read that was not asked for. Elsewhere elements stream by. All of it is a
function of (epoch, position), so that every rank, and a run that goes on later, gets the same.
"""

from .changes import Batch, Map, Zip
from .dataset_plan import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, DatasetPlan, SliceRows
from .positions import Concatenate, Permutation, Prefetch, Repeat, Shard, Window
from .sources import Generated, Items, Range, Slices
from .streams import BufferShuffle, Filter, Unbatch

__all__ = [
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "Batch",
    "BufferShuffle",
    "Concatenate",
    "DatasetPlan",
    "Filter",
    "Generated",
    "Items",
    "Map",
    "Permutation",
    "Prefetch",
    "Range",
    "Repeat",
    "Shard",
    "SliceRows",
    "Slices",
    "Unbatch",
    "Window",
    "Zip",
]
