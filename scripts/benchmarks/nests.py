"""What is reduced: nests of float32 arrays, and numbers in them by which a result is checked."""

import numpy as np

#: How many units each stage of ResNet-50 has, and their inner channels.
_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
_EXPANSION = 4
_CLASSES = 1000

# Sums of these integers are exact in float16 and bfloat16, too, on a few ranks.
_PERIOD = 31


def resnet50(width=64):
    """Return the shapes of ResNet-50's 161 parameters, as a nest.

    Parameters
    ----------
    width : int
        Channels of the first layer. With 64, as in the paper, there are 25.6 million parameters.
    """
    thin = width / 64
    stem = {"conv": (7, 7, 3, width), "norm": _norm(width)}
    stages, channels = {}, width
    for stage, (count, inner) in enumerate(_STAGES, 1):
        inner = int(inner * thin)
        units = {}
        for number in range(1, count + 1):
            units[f"unit{number}"] = _bottleneck(channels, inner, has_projection=number == 1)
            channels = inner * _EXPANSION
        stages[f"stage{stage}"] = units
    return {"stem": stem, **stages, "head": {"weight": (channels, _CLASSES), "bias": (_CLASSES,)}}


def _bottleneck(channels, inner, *, has_projection):
    outer = inner * _EXPANSION
    shapes = {
        "conv1": (1, 1, channels, inner),
        "norm1": _norm(inner),
        "conv2": (3, 3, inner, inner),
        "norm2": _norm(inner),
        "conv3": (1, 1, inner, outer),
        "norm3": _norm(outer),
    }
    if has_projection:
        shapes["projection"] = {"conv": (1, 1, channels, outer), "norm": _norm(outer)}
    return shapes


def _norm(channels):
    return {"scale": (channels,), "offset": (channels,)}


def leaves_of(nest):
    """Return the leaves of nested dicts and lists, by the order of keys."""
    if isinstance(nest, dict):
        nest = [nest[key] for key in sorted(nest)]
    elif not isinstance(nest, list):
        return [nest]
    return [leaf for item in nest for leaf in leaves_of(item)]


def arrays_of(shapes, dtype=np.float32):
    """Return the nest with an array of zeros for each shape, all of whose memory is there."""
    if isinstance(shapes, dict):
        return {key: arrays_of(item, dtype) for key, item in shapes.items()}
    if isinstance(shapes, list):
        return [arrays_of(item, dtype) for item in shapes]
    array = np.empty(shapes, dtype)
    array.fill(0)  # np.zeros has no memory before it is written to
    return array


def contribution(arrays, rank):
    """Return arrays like these, with what a rank contributes to sums that can be checked."""
    return [_pattern(array, index, rank + 1) for index, array in enumerate(arrays)]


def total(arrays, ranks):
    """Return the sums of the contributions of so many ranks."""
    times = ranks * (ranks + 1) // 2
    return [_pattern(array, index, times) for index, array in enumerate(arrays)]


def are_equal(arrays, expected):
    """Return whether two lists hold the same numbers; results may be flat."""
    return all(
        np.array_equal(np.reshape(array, other.shape), other)
        for array, other in zip(arrays, expected, strict=True)
    )


def _pattern(array, index, times):
    period = ((np.arange(_PERIOD) + index) % _PERIOD * times).astype(array.dtype)
    return np.resize(period, array.size).reshape(array.shape)
