"""all_gather: the values of all replicas, one behind the other along an axis.

Everything travels as bytes, whatever its dtype. The extents along the axis travel with the
header, and so does the data where it is small. `blocks` knows where everything lies, `collection`
moves it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import nest
from ..core.argument_checks import integer
from ..core.array_libraries import give_back, library_of, way_back
from ..core.array_ways import Array
from ..core.dtypes import as_plain_array, common, is_text, wire_name
from ..core.gpu_tensors import lender, on_host, own_results
from ..core.indexed_slices import IndexedSlices
from ..core.options import CommunicationOptions
from ..ranks.transport import HEADER_BYTES
from .agreement.call import Call
from .agreement.group import Group
from .agreement.site import CallSite
from .agreement.stand import LeafDescription
from .agreement.steps import Agree, Raise, Steps
from .blobs import LARGE_BYTES, all_blobs, payload_of
from .blocks import Gathering, GatheringPlan, LeafForm
from .collection import Collection, OneRow, collection
from .inline_gather import AllGatherHeaders, GatherHeaders

_NUMBERS = "biufc"

# The leaves of all local replicas, what is told of them, and the headers, if that travels in these.
_Prepared = tuple[Sequence[Sequence[Array]], bytes, GatherHeaders | None]


class AllGather(Call):
    """One call of ``all_gather``, or of ``gather`` in cross-replica context.

    `contributions` are the leaves of each replica that this call stands for; `paths` tell where
    they are, where these are only some of the leaves of `structure`, and the result is a list.
    `plain` is what `nest.flatten_plain` has told of the leaves.
    """

    plan: GatheringPlan
    #: Where everything lies in the results.
    gathering: Gathering

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        kind: str,
        axis: int,
        contributions: Sequence[Sequence[Any]],
        structure: nest.Structure,
        detail: str | None = None,
        paths: Sequence[str] | None = None,
        plain: int = nest.OTHERS,
    ) -> None:
        self.site = site
        self.options = options
        self.kind = kind
        self.leaves = contributions
        self.structure = structure
        self.flat_paths = paths
        self.axis = axis if type(axis) is int else integer("axis", axis)
        self.detail = f"axis={self.axis}" if detail is None else detail
        self.way_back = None if plain else way_back(contributions[0])
        self.contributions = [self._arrays(leaves) for leaves in contributions]
        signature, *others = map(self._signature, self.contributions)
        self.agrees = others.count(signature) == len(others)
        key = (self.detail, nest.key(structure), signature)
        self.identify(key if paths is None else (*key, tuple(paths)))

    @property
    def lent(self) -> Sequence[Any]:
        return self.leaves[0]

    @property
    def _for_objects(self) -> str:
        """What takes values that are no arrays, where this call is made."""
        return "strategy.gather_objects" if self.kind == "gather" else "merge_call"

    def _arrays(self, leaves: Sequence[Any]) -> list[Array]:
        arrays = []
        for index, leaf in enumerate(on_host(leaves)):
            if isinstance(leaf, IndexedSlices):
                raise NotImplementedError(
                    f"{self.kind} of IndexedSlices (value{self.paths[index]}) is not supported, as"
                    " in tf.distribute. Gather its values and indices."
                )
            try:
                array = as_plain_array(leaf)
            except TypeError as error:
                raise TypeError(f"{self.kind} of value{self.paths[index]}: {error}") from error
            if array.dtype.hasobject or not array.dtype.itemsize:
                ways = ".astype(float) or .astype(str) for numbers and texts, and "
                raise TypeError(
                    f"{self.kind} got {type(leaf).__name__} of dtype {array.dtype} for"
                    f" value{self.paths[index]}, which is no array of a fixed item size. Use"
                    f" {ways if array.ndim else ''}{self._for_objects} for other values."
                )
            if array.ndim == 0:
                instead = f", or use {self._for_objects}" if self.kind == "gather" else ""
                one_row = f"np.array([{leaf!r}])" if library_of(leaf) is None else "x[None] of it"
                raise ValueError(
                    f"{self.kind} got a scalar for value{self.paths[index]}: {leaf!r}. Only arrays"
                    f" can be concatenated; write {one_row}{instead}."
                )
            if not -array.ndim <= self.axis < array.ndim:
                raise ValueError(
                    f"axis {self.axis} is out of range for value{self.paths[index]} of shape"
                    f" {array.shape}. It must be from {-array.ndim} to {array.ndim - 1}."
                )
            arrays.append(array)
        return arrays

    def _signature(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        """Returns what must be the same on all replicas: all but extents and lengths of strings."""
        signature = []
        for array in arrays:
            dtype, shape = array.dtype, array.shape
            kind = dtype.kind
            name = dtype if kind in _NUMBERS else kind if is_text(dtype) else wire_name(dtype)
            axis = self.axis % len(shape)
            signature.append((name, shape[:axis], shape[axis + 1 :]))
        return tuple(signature)

    def make_plan(self) -> GatheringPlan:
        """Returns how the leaves travel, as far as their extents leave it open."""
        return GatheringPlan(
            [
                LeafForm(common(array.dtype), self.axis % array.ndim, array.shape)
                for array in self.contributions[0]
            ]
        )

    def leaves_in_words(self, position: int) -> tuple[LeafDescription, ...]:
        leaves = []
        for array in self.contributions[position]:
            dtype, axis = array.dtype, self.axis % array.ndim
            name = {"U": "str", "S": "bytes"}.get(dtype.kind) or wire_name(dtype)
            shape = (*array.shape[:axis], None, *array.shape[axis + 1 :])
            leaves.append(LeafDescription(name, shape))
        return tuple(leaves)

    def prepare(self, group: Group, calls: Sequence[AllGather]) -> tuple[bytes, _Prepared]:
        contributions = self.contributions
        if len(calls) > 1:
            contributions = [leaves for call in calls for leaves in call.contributions]
        told = self.plan.told(contributions)
        all_headers: AllGatherHeaders = group.kept[AllGatherHeaders]
        headers = all_headers[self.plan, group.sizes.next_bytes]
        if not headers.has_room:
            return payload_of(group, told), (contributions, told, None)
        group.lay_by_reserve(LARGE_BYTES)
        return headers.payload(told, contributions), (contributions, told, headers)

    def steps(
        self, group: Group, calls: Sequence[AllGather], prepared: _Prepared
    ) -> Steps[list[Array]] | list[Array]:
        contributions, told, headers = prepared
        if headers is None:
            return self._move_behind(group, told, contributions)
        gathering, columns, header_bytes = headers.read()
        if header_bytes > HEADER_BYTES:
            group.sizes.learn(header_bytes)
        if columns is None or gathering.impossible is not None:
            return self._move(group, gathering, contributions)
        self.gathering = gathering
        return group.with_reserve(
            lambda: [np.concatenate(blocks, axis, dtype=dtype) for blocks, axis, dtype in columns]
        )

    def _move_behind(
        self, group: Group, told: bytes, contributions: Sequence[Sequence[Array]]
    ) -> Steps[list[Array]]:
        """Moves everything where not even what is told of the leaves fits into a header."""
        blobs = yield from all_blobs(group, told)
        gathering = self.plan.gathering([blob.tobytes() for blob in blobs], group.layout.counts)
        return (yield from self._move(group, gathering, contributions))

    def _move(
        self, group: Group, gathering: Gathering, contributions: Sequence[Sequence[Array]]
    ) -> Steps[list[Array]]:
        if gathering.impossible is not None:
            yield Raise(self._too_large(gathering.impossible, gathering))
        self.gathering = gathering

        def make() -> OneRow | Collection:
            lend = lender(self.leaves[0], group.pool.lend)
            return collection(group, gathering, contributions, lend)

        if gathering.result_bytes > LARGE_BYTES:
            made = yield Agree(lambda: (b"", make()))
        else:
            made = group.with_reserve(make)
        results: list[Array] = yield from made.steps()
        return results

    def _too_large(self, index: int, gathering: Gathering) -> ValueError:
        dtype, shape = gathering.leaves[index].result
        return ValueError(
            f"{self.kind} of value{self.paths[index]} would give an array of shape {shape} and"
            f" dtype {dtype.name}, and numpy has none so large: with extents of 0 left out it would"
            f" have more than {sys.maxsize} bytes. Give shorter values along axis {self.axis}."
        )

    def answer(self, calls: Sequence[AllGather], results: list[Array]) -> list[Any]:
        for call in calls[1:]:
            call.gathering = self.gathering
        each = [results, *own_results([call.leaves[0] for call in calls[1:]], results)]
        each = [give_back(mine, call.way_back) for mine, call in zip(each, calls, strict=True)]
        if self.flat_paths is not None:
            return each
        # Of dicts each has its keys in its own order.
        pairs = zip(calls, each, strict=True)
        return [nest.unflatten(call.structure, mine) for call, mine in pairs]
