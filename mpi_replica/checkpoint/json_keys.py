"""The keys of JSON objects that stand for what JSON does not have."""

from __future__ import annotations

REPLICAS, ALIKE, MIRRORED = "$replicas", "$alike", "$mirrored"
VARIABLE = "$variable"  # never in a file
STATE, MODULE, OPTIMIZER = "$state", "$module", "$optimizer"
ARRAY, SCALAR, TENSOR, BYTES, COMPLEX = "$array", "$scalar", "$tensor", "$bytes", "$complex"
TUPLE, DICT, COUNTER = "$tuple", "$dict", "$counter"
