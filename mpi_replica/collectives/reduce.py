"""all_reduce: one result out of the contributions of all replicas.

`AllReduce` is behind ``all_reduce``, ``reduce``, ``reduce_to`` and the aggregations of variables:
it takes the leaves of each local replica and gives one result for each leaf. What is small travels
in the header (`inline`), all else in parts (`movement`), each of which goes its way (`ways`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import nest
from ..core.array_ways import Array
from ..core.dtypes import accumulation, as_array, as_arrays, is_narrow_float, like_numpys, wire_name
from ..core.gpu_tensors import lender, own_results
from ..core.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from ..core.telling_keys import require_telling_keys
from ..core.ufuncs import EXTREMES
from ..ranks.transport import HEADER_BYTES, Bytes, Payload
from .agreement.call import Call
from .agreement.group import Group
from .agreement.site import CallSite
from .agreement.stand import CallDescription, LeafDescription
from .agreement.steps import Agree, Gather, Steps
from .broadcast import Writing
from .choice_of_way import ChoiceOfWay
from .inline import InlineReduction, InlineReductions
from .movement import Movement, OnePiece, Task, one_piece
from .ordered_ways import OrderedWay
from .outputs import Outputs, check_replicas
from .plan import Plan, Signature, plan, signature_of

_SHARED_MEMORY = CommunicationImplementation.SHARED_MEMORY
_ORDERED_IMPLEMENTATIONS = frozenset({_SHARED_MEMORY, CommunicationImplementation.ALLTOALL})

# Of each call.
_Results = list[list[Any]]

# What moves the data, and the results; or a reduction, its message and memory for its totals; or
# nothing, where a way must be opened first.
_Prepared = (
    tuple[Movement | OnePiece, _Results] | tuple[InlineReduction, Payload, list[Array]] | None
)

_FLOAT64 = np.dtype(np.float64)
_PYTHON_NUMBERS = {int: "int", float: "float"}


class AllReduce(Call):
    """One call of ``all_reduce``, or of a reduction in cross-replica context.

    Parameters
    ----------
    kind : str
        The name of the call, as the user knows it.
    contributions : list of list
        The leaves of each replica that this call stands for.
    out : nest, optional
        Where the results go.
    detail : str
        What else of the arguments must be the same.
    paths : sequence of str, optional
        Where the leaves are, where these are only some of the leaves of `structure`, and the
        result is a list.
    finish : callable, optional
        What is done with the results, once on each rank; it gives the result of the call.
    writing : Writing, optional
        What writes the result of the only leaf, once on each rank.
    asked : ReduceOp, optional
        What the user asked for, where `op` is what is left of it to do.
    dtypes : sequence of sequence of numpy.dtype, optional
        What the leaves of each replica were before a part of the reduction was done.
    plain : int
        What `nest.flatten_plain` has told of the leaves.
    """

    outputs: Outputs | None = None
    #: Leaves that are Python ints here, and Python floats on other replicas.
    promoted: Sequence[int] = ()
    plan: Plan

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        kind: str,
        op: ReduceOp | str,
        contributions: Sequence[Sequence[Any]],
        structure: nest.Structure,
        out: Any = None,
        plain: int = nest.OTHERS,
        detail: str = "",
        paths: Sequence[str] | None = None,
        finish: Callable[[list[Any]], Any] | None = None,
        writing: Writing | None = None,
        asked: ReduceOp | None = None,
        dtypes: Sequence[Sequence[np.dtype[Any]]] | None = None,
    ) -> None:
        self.site = site
        self.options = options
        self.kind = kind
        self.op = op = ReduceOp.of(op)
        self.asked = asked or op
        self.leaves = contributions
        self.structure = structure
        self.detail = detail
        self.flat_paths = paths
        self.finish = finish
        self.writing = writing
        self.dtypes = dtypes
        try:
            first, self.way_back = as_arrays(contributions[0], plain)
            self.contributions: list[Sequence[Array]] = [first]
            if len(contributions) > 1:
                self.contributions += [as_arrays(leaves, plain)[0] for leaves in contributions[1:]]
        except TypeError as error:
            raise self._at_its_leaf(error) from error
        if out is not None:
            outputs = self.outputs = Outputs(out, structure, contributions[0], first)
            self.detail = outputs.words
        self._sign()
        if out is not None:
            outputs.check(self.plan.results, self.paths)

    @property
    def lent(self) -> Sequence[Any]:
        leaves = self.leaves[0]
        if self.outputs is None:
            return leaves
        results = set(map(id, self.outputs.leaves))  # whose memory is compared by itself
        return [None if id(leaf) in results else leaf for leaf in leaves]

    def _at_its_leaf(self, error: TypeError) -> TypeError:
        """Returns an error of `as_arrays` with the path of the leaf."""
        for leaves in self.leaves:
            for path, leaf in zip(self.paths, leaves, strict=True):
                try:
                    as_array(leaf)
                except TypeError as found:
                    return TypeError(f"{self.kind} of value{path}: {found}")
        return error

    def _sign(self) -> None:
        contributions = self.contributions
        signature = signature_of(contributions[0])
        key: tuple[Any, ...] = (self.op, self.detail, nest.key(self.structure), signature)
        if self.dtypes is not None or self.flat_paths is not None:
            dtypes = None if self.dtypes is None else tuple(self.dtypes[0])
            key += (self.asked, dtypes, self.paths)
        self.agrees = len(contributions) == 1 or self._components_agree(signature)
        if self.agrees:
            self.identify(key)
        else:  # what is the mistake of one replica is so in whatever layout
            self._require_numbers()
            require_telling_keys(self.structure)

    def _components_agree(self, signature: Signature) -> bool:
        for position, arrays in enumerate(self.contributions):
            other = signature_of(arrays)
            if other != signature and _native(other) != _native(signature):
                return False
            if self.dtypes is not None and tuple(self.dtypes[position]) != tuple(self.dtypes[0]):
                return False
        return True

    def _require_numbers(self) -> None:
        """Raises where a replica has given what can't be reduced."""
        for leaves, arrays in zip(self.leaves, self.contributions, strict=True):
            for path, leaf, array in zip(self.paths, leaves, arrays, strict=True):
                if leaf is None:  # which is no other dtype of the same leaf
                    raise none_error(self.kind, path, self.op)
                dtype = array.dtype
                kind = like_numpys(dtype).kind
                if kind not in "biufc" and (kind != "V" or dtype.names is not None):
                    gather, objects = "strategy.gather", "strategy.gather_objects"
                    if self.kind == "all_reduce":
                        gather, objects = "all_gather", "merge_call"
                    raise TypeError(
                        f"{self.kind} got {type(leaf).__name__} of dtype {dtype} for value{path}:"
                        f" {self.op.name} needs numbers. Use {gather} for strings and dates, and"
                        f" {objects} for other values."
                    )
                try:
                    accumulation(dtype, self.op)
                except TypeError as error:
                    raise TypeError(f"{self.kind} of value{path}: {error}") from None

    def make_plan(self) -> Plan:
        """Returns how the leaves travel; raises where one can't be reduced."""
        self._require_numbers()
        signature = signature_of(self.contributions[0])
        return plan(signature, self.op, self.options.bytes_per_pack, self._is_order_asked)

    def promote(self, change: Sequence[int]) -> None:
        for position, arrays in enumerate(self.contributions):
            wide = list(arrays)
            for index in change:
                wide[index] = wide[index].astype(_FLOAT64)
            self.contributions[position] = wide
        self.promoted = (*self.promoted, *change)
        self._sign()

    def words(self, position: int = 0) -> CallDescription:
        detail = f"{self.asked.name}{', ' * bool(self.detail)}{self.detail}"
        size_bytes = sum(array.nbytes for array in self.contributions[position])
        return super().words(position)._replace(detail=detail, size_bytes=size_bytes)

    def leaves_in_words(self, position: int) -> tuple[LeafDescription, ...]:
        arrays = self.contributions[position]
        dtypes = [a.dtype for a in arrays] if self.dtypes is None else self.dtypes[position]
        alike: dict[LeafDescription, LeafDescription] = {}  # of thousands of leaves, a few
        leaves = []
        for index, (leaf, dtype, array) in enumerate(
            zip(self.leaves[position], dtypes, arrays, strict=True)
        ):
            number = "float" if index in self.promoted else _PYTHON_NUMBERS.get(type(leaf), "")
            description = LeafDescription(wire_name(dtype), array.shape, number)
            leaves.append(alike.setdefault(description, description))
        return tuple(leaves)

    @property
    def _is_order_asked(self) -> bool:
        """Whether contributions are combined in the order of the replicas, whatever they are.

        Also where they are what narrow floats have added up to along an axis.
        """
        options = self.options
        return self.op not in EXTREMES and (
            bool(options.reproducible)
            or options.implementation in _ORDERED_IMPLEMENTATIONS
            or (self.dtypes is not None and any(map(is_narrow_float, self.dtypes[0])))
        )

    def prepare(self, group: Group, calls: Sequence[AllReduce]) -> tuple[Payload, _Prepared]:
        if self.outputs is not None and (self.promoted or len(calls) > 1):
            self._check_outputs(calls)
        plan = self.plan
        reductions: InlineReductions = group.kept[InlineReductions]
        reduction = reductions[plan, group.sizes.next_bytes]
        ordered = None
        if plan.is_ordered:
            implementation = self.options.implementation
            # Also where nothing goes by it: an error where it can't be had.
            is_needed = reduction is None or implementation is _SHARED_MEMORY
            if is_needed and self._is_order_asked:
                ordered = group.kept[ChoiceOfWay].ordered(implementation)
                if ordered is None:
                    return b"", None
        contributions = self.contributions
        if len(calls) > 1:
            contributions = [leaves for call in calls for leaves in call.contributions]
        if self.writing is not None:
            self.writing.prepare()
        if reduction is not None:
            payload, totals = reduction.prepare(contributions)
            prepared = reduction, payload, totals
            return b"" if reduction.message is not None else payload, prepared
        return b"", self._movement(group, calls, contributions, ordered)

    def _movement(
        self,
        group: Group,
        calls: Sequence[AllReduce],
        contributions: Sequence[Sequence[Array]],
        ordered: OrderedWay | None,
    ) -> tuple[Movement | OnePiece, _Results]:
        """Returns what moves the data, with all the memory that it needs."""
        outputs = self.outputs
        results = [
            self.plan.allocation.make(lender(call.leaves[0], group.pool.lend))
            if call.outputs is None
            else call.outputs.leaves
            for call in calls
        ]
        is_in_place = outputs is not None and outputs.are_values
        task = Task(group, self.plan, contributions, results, outputs is not None, is_in_place)
        return one_piece(task, ordered) or Movement(task, ordered), results

    def steps(
        self, group: Group, calls: Sequence[AllReduce], prepared: _Prepared
    ) -> Steps[_Results] | _Results:
        if prepared is None:
            return self._open_way(group, calls)
        if len(prepared) == 2:
            return self._move(*prepared)
        reduction, payload, totals = prepared
        if reduction.header_bytes > HEADER_BYTES:
            group.sizes.learn(reduction.header_bytes)
        if reduction.message is not None:
            return self._exchange_message(calls, reduction, reduction.message, payload, totals)
        if len(calls) == 1 and self.writing is None and self.outputs is None:
            return [reduction.results(totals)]
        return self._reduced(calls, reduction, totals)

    def _open_way(self, group: Group, calls: Sequence[AllReduce]) -> Steps[_Results]:
        """Makes the way by which the parts go, and begins anew."""
        yield from group.kept[ChoiceOfWay].opened(self.options.implementation)
        prepared = yield Agree(lambda: self.prepare(group, calls))
        results = self.steps(group, calls, prepared)
        if isinstance(results, list):
            return results
        return (yield from results)

    def _exchange_message(
        self,
        calls: Sequence[AllReduce],
        reduction: InlineReduction,
        message: Bytes,
        payload: Payload,
        totals: list[Array],
    ) -> Steps[_Results]:
        own = np.frombuffer(payload, np.uint8)
        if len(reduction.rank_bytes) == 1:
            np.copyto(message, own)
        else:
            yield Gather(own, message, reduction.rank_bytes)
        return self._reduced(calls, reduction, totals)

    def _reduced(
        self, calls: Sequence[AllReduce], reduction: InlineReduction, totals: list[Array]
    ) -> _Results:
        """Returns the results of a reduction that every rank does for itself, of the first call."""
        results = reduction.results(totals)
        if self.writing is not None:
            self._write(self.writing, [results])
        if self.outputs is not None:
            for call in calls:
                if call.outputs is not None:
                    call.outputs.take(results)
        return [results]

    def _move(self, movement: Movement | OnePiece, each: _Results) -> Steps[_Results]:
        yield from movement.steps()
        if self.outputs is None and self.options.bytes_per_pack:
            # Even scalars can be streams, then.
            each = [[leaf if leaf.ndim else leaf[()] for leaf in results] for results in each]
        if self.writing is not None:
            self._write(self.writing, each)
        return each

    def _write(self, writing: Writing, each: _Results) -> None:
        writing.compute(np.asarray(each[0][0]))
        writing.commit()

    def answer(self, calls: Sequence[AllReduce], results: _Results) -> list[Any]:
        if self.finish is not None:
            return [self.finish(results[0])] * len(calls)
        if len(calls) == 1:
            return [self.given_back(results[0])]
        each = results
        if len(results) < len(calls):
            others = [call.leaves[0] for call in calls[len(results) :]]
            each = [*results, *own_results(others, results[0])]
        return [call.given_back(mine) for call, mine in zip(calls, each, strict=True)]

    def given_back(self, results: list[Any]) -> Any:
        """Returns the results as this call gives them."""
        if self.outputs is not None:
            return self.outputs.filled()
        if self.way_back is not None:
            results = self.way_back(results)
        return results if self.flat_paths is not None else nest.unflatten(self.structure, results)

    def _check_outputs(self, calls: Sequence[AllReduce]) -> None:
        """Raises where a result has no place that it fits into, or takes that of a value."""
        for call in calls:
            if call.outputs is not None and call.promoted:  # the results are others now
                call.outputs.check(self.plan.results, self.paths)
        if len(calls) > 1:
            outputs = [call.outputs for call in calls if call.outputs is not None]
            check_replicas(outputs, [call.contributions[0] for call in calls], self.paths)


def none_error(kind: str, path: str, op: ReduceOp) -> TypeError:
    """Returns the error of a call that got None for a leaf."""
    return TypeError(
        f"{kind} got None for value{path}: {op.name} needs numbers. Leave it out on all replicas,"
        " or give zeros, as for the gradient of a parameter that was not used."
    )


def _native(signature: Signature) -> Signature:
    """Returns `signature` with dtypes of native byte order, which is no difference that counts."""
    dtypes, shapes = signature
    return tuple(dtype.newbyteorder("=") for dtype in dtypes), shapes
