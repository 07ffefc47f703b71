"""Values of replicas: what a distributed computation takes and gives."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NoReturn

import numpy as np

from . import nest
from .exceptions import RankLostError
from .indexed_slices import IndexedSlices
from .layout import Era, Layout

_WAYS_OUT = (
    "Use strategy.reduce(op, value, axis=None) or strategy.gather(value, axis) for one value of"
    " all replicas, or strategy.experimental_local_results(value) for a tuple of the values here."
)
# What can be iterated, in an order that is not that of replica ids.
_NO_SEQUENCES = (Mapping, Set, str, bytes)
# That of a value which was made by hand, on no layout.
_FOR_EVER = Era()


class DistributedValues:
    """Base of everything that holds a value per replica (`tf.distribute.DistributedValues`).

    Never made directly: `PerReplica` and `Mirrored` are its kinds, and so are variables.

    Examples
    --------
    >>> result = mr.MPIStrategy(num_replicas=2).run(lambda: 1)
    >>> isinstance(result, mr.DistributedValues), isinstance(Mirrored(1), mr.DistributedValues)
    (True, True)
    """

    __slots__ = ()

    def __init__(self, *values: Any) -> None:
        raise TypeError("DistributedValues is a base class. Make a PerReplica or use a Variable.")

    @property
    def holds_all(self) -> bool:
        """Whether the components of all replicas are here."""
        return False

    def require(self, num_replicas: int) -> None:
        """Raise unless a strategy with so many replicas can use it."""

    def components(self, replica_ids: Sequence[int]) -> list[Any] | None:
        """Return the components of these local replicas; None where all replicas share one value.

        Never communicates.
        """
        raise NotImplementedError

    def shared_value(self) -> Any:
        """Return the one value of all replicas; only where `components` gives None."""
        raise NotImplementedError


class _NoUfuncs:
    """What a `PerReplica` tells numpy, which must not take it for an object array."""

    def __get__(self, value: Any, kind: type) -> Callable[..., NoReturn] | None:
        # numpy asks the class for what says why; operators of masked arrays ask the object: where
        # it has None they leave it to `PerReplica.__radd__`
        return _refuse_ufunc if value is None else None


def _refuse_ufunc(value: Any, ufunc: np.ufunc, *arguments: Any, **kwargs: Any) -> NoReturn:
    is_comparison = ufunc in (np.equal, np.not_equal)  # as with a number of Python on that side
    _refuse("__eq__" if is_comparison else f"ufunc {ufunc.__name__}")(value)


class PerReplica(DistributedValues):
    """A value per replica, in general different ones.

    What ``strategy.run`` and distributed datasets give (components of this rank's replicas),
    and what a ``merge_fn`` receives (components of all replicas).

    Parameters
    ----------
    values : sequence
        The components, in the order of the replica ids.
    replica_ids : sequence of int, optional
        Global ids of the replicas whose components these are. Default: 0, 1, ...
    num_replicas : int, optional
        How many replicas the strategy has. Default: the number of components.

    Raises
    ------
    ValueError
        There are not as many ids as components, or one stands twice.
    TypeError
        `values` is a dict, a set or a text.

    Notes
    -----
    It converts (``float``, ``int``, ``bool``, ``np.asarray``, ``.item()``) only when the strategy
    has one replica; a program that runs on four ranks with one replica each must run on two with
    two. It has no arithmetic, and is compared with nothing but itself: where it stands in the place
    of a number, that is an error. Counterpart of ``tf.types.experimental.PerReplica``.

    Examples
    --------
    >>> PerReplica([5.0, 6.0])
    PerReplica:{
      0: 5.0,
      1: 6.0
    }
    """

    __slots__ = ("__weakref__", "_are_rows", "_era", "_num_replicas", "_replica_ids", "_values")

    __array_ufunc__: Any = _NoUfuncs()

    def __init__(
        self,
        values: Sequence[Any],
        replica_ids: Sequence[int] | None = None,
        num_replicas: int | None = None,
    ) -> None:
        if type(values) not in (list, tuple) and isinstance(values, _NO_SEQUENCES):
            raise TypeError(
                f"PerReplica needs the components in the order of the replica ids, got the"
                f" {type(values).__name__} {values!r}. Write PerReplica(list(values.values()),"
                " replica_ids=list(values)) for a dict by ids."
            )
        self._values = tuple(values)
        count = len(self._values)
        self._replica_ids = tuple(range(count)) if replica_ids is None else tuple(replica_ids)
        self._num_replicas = count if num_replicas is None else num_replicas
        self._era = _FOR_EVER
        self._are_rows = False
        if len(self._replica_ids) != count:
            raise ValueError(
                f"PerReplica got {count} components for the {len(self._replica_ids)} replica ids"
                f" {self._replica_ids!r}. Give one component for each."
            )
        if replica_ids is not None and len(set(self._replica_ids)) != count:
            raise ValueError(
                f"PerReplica got the replica ids {self._replica_ids!r}, of which one stands twice."
            )

    @property
    def values(self) -> tuple[Any, ...]:
        """The components that are here, in the order of `replica_ids`."""
        if self._era.is_over:
            self._refuse()
        return self._values

    @property
    def replica_ids(self) -> tuple[int, ...]:
        """Global ids of the replicas whose components are here."""
        return self._replica_ids

    @property
    def num_replicas(self) -> int:
        """How many replicas the strategy has."""
        return self._num_replicas

    @property
    def holds_all(self) -> bool:
        """Whether the components of all replicas are here."""
        return len(self._replica_ids) == self._num_replicas

    def require(self, num_replicas: int) -> None:
        """Raise unless this is a value of a strategy with so many replicas.

        Raises
        ------
        ValueError
            It is one of another strategy, or was made by hand with a wrong number of components.
        RankLostError
            It was made before replicas have moved.
        """
        if self._era.is_over:
            self._refuse()
        if self._num_replicas != num_replicas:
            raise ValueError(
                f"a PerReplica of {self._num_replicas} replicas was given to a strategy that has"
                f" {num_replicas}. Pass what this strategy gave (run, a distributed dataset,"
                " experimental_distribute_values_from_function)."
            )

    def component(self, replica_id: int) -> Any:
        """Return the component of one replica, by its global id.

        Parameters
        ----------
        replica_id : int
            The id.

        Returns
        -------
        object
            The component itself, no copy. No communication, but for large arguments in a
            ``merge_fn``: see `ReplicaContext.merge_call`.

        Raises
        ------
        ValueError
            There is no component for it here.
        RankLostError
            It was made before replicas have moved.

        Examples
        --------
        >>> mr.PerReplica(["a", "b"]).component(1)
        'b'
        """
        values = self.values
        if replica_id not in self._replica_ids:
            raise ValueError(
                f"a PerReplica with components for replicas {self._replica_ids!r} has none for"
                f" replica {replica_id}. Give one for each replica, as strategy.run and"
                " experimental_distribute_values_from_function do."
            )
        return values[self._replica_ids.index(replica_id)]

    def components(self, replica_ids: Sequence[int]) -> list[Any]:
        """Return the components of these replicas."""
        return [self.component(i) for i in replica_ids]

    def _texts(self, show: Callable[[Any], str]) -> list[str]:
        return [show(value) for value in self._values]

    def _refuse(self) -> NoReturn:
        raise RankLostError(
            f"a PerReplica with components for replicas {self._replica_ids!r} was made before a"
            " rank was lost: replicas have moved since. Make it anew, in the function that is"
            " given to run_elastic, or hold it in the mr.ElasticState."
        )

    def _shown(self, show: Callable[[Any], str]) -> str:
        if self._era.is_over:
            return f"PerReplica:{{{self._replica_ids!r}: made before a rank was lost}}"
        texts = zip(self._replica_ids, self._texts(show), strict=True)
        rows = ",\n".join(f"  {i}: {text}" for i, text in texts)
        return f"PerReplica:{{\n{rows}\n}}"  # also where only looking would gather it

    def __repr__(self) -> str:
        return self._shown(repr)

    def __str__(self) -> str:
        return self._shown(str)

    def __reduce__(self) -> Any:
        return PerReplica, (self.values, self._replica_ids, self._num_replicas)

    def _only(self, what: str) -> Any:
        if self._num_replicas != 1:
            raise TypeError(
                f"{what} of a PerReplica: it holds a value per replica, and the strategy has"
                f" {self._num_replicas}. {_WAYS_OUT}"
            )
        return self.values[0]

    def __float__(self) -> float:
        return float(self._only("float()"))

    def __int__(self) -> int:
        return int(self._only("int()"))

    def __bool__(self) -> bool:
        return bool(self._only("The truth value"))

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self._only("round()"), ndigits)

    def __format__(self, spec: str) -> str:
        return format(self._only("A format"), spec) if spec else str(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self._only("np.asarray()"), dtype=dtype, copy=copy)

    def item(self) -> Any:
        """Return the only component as a Python scalar; the strategy must have one replica.

        Returns
        -------
        int, float, complex, bool or other scalar
            As ``numpy.ndarray.item`` gives it.

        Raises
        ------
        TypeError
            The strategy has several replicas.
        ValueError
            The component has more than one item, or none.
        RankLostError
            It was made before replicas have moved.

        Examples
        --------
        >>> mr.MPIStrategy().run(lambda: np.float32(2.5)).item()
        2.5
        """
        return np.asarray(self._only("item()")).item()


def _refuse(name: str, kind: type[Exception] = TypeError) -> Callable[..., NoReturn]:
    def method(self: PerReplica, *others: Any) -> NoReturn:
        raise kind(
            f"A PerReplica has no {name}: it holds a value per replica. Give it to strategy.run in"
            f" args: each replica gets its own component there, and computes with it. {_WAYS_OUT}"
        )

    method.__name__ = name
    return method


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul"),
    *("rand", "ror", "rxor", "neg", "pos", "abs", "invert"),
    *("lt", "le", "gt", "ge", "len", "iter", "getitem", "index"),
    *("contains", "setitem", "delitem", "divmod", "rdivmod"),
):
    setattr(PerReplica, f"__{_name}__", _refuse(f"__{_name}__"))

# What batches are asked for most. No `__getattr__`: with one, all attributes take twice as long.
for _name in (
    *("T", "astype", "copy", "dtype", "flatten", "max", "mean", "min", "ndim", "numpy", "ravel"),
    *("reshape", "shape", "size", "squeeze", "std", "sum", "to", "tolist", "transpose", "var"),
):
    setattr(PerReplica, _name, property(_refuse(_name, AttributeError), doc="It has none."))


def _is_itself(self: PerReplica, other: Any) -> bool:
    return self is other or _refuse("__eq__")(self)


# Python's own would be False for any number, and `if strategy.run(step) == 0:` go the wrong way.
PerReplica.__eq__ = _is_itself  # type: ignore[method-assign,assignment]


class ActsAsValue(DistributedValues, np.lib.mixins.NDArrayOperatorsMixin):
    """What converts, computes and is looked into as the one value in it: `shared_value`."""

    __slots__ = ()

    #: Tables of pandas leave their operators to it: they would take it for a list.
    __pandas_priority__ = 5000

    def __float__(self) -> float:
        return float(self.shared_value())

    def __int__(self) -> int:
        return int(self.shared_value())

    def __index__(self) -> int:
        return operator.index(self.shared_value())

    def __complex__(self) -> complex:
        return complex(self.shared_value())

    def __bool__(self) -> bool:
        return bool(self.shared_value())

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.shared_value(), ndigits)

    def __format__(self, spec: str) -> str:
        return format(self.shared_value(), spec) if spec else str(self)

    def __len__(self) -> int:
        return len(self.shared_value())

    def __getitem__(self, key: Any) -> Any:
        return self.shared_value()[key]

    def __iter__(self) -> Any:
        return iter(self.shared_value())

    def __contains__(self, item: Any) -> bool:
        return item in self.shared_value()

    __hash__ = object.__hash__


#: Of two arguments or three, or that the module operator does not have.
_BUILTIN: dict[str, Callable[..., Any]] = {"pow": pow, "divmod": divmod}


def _operator(name: str) -> Callable[..., Any]:
    compute = _BUILTIN.get(name) or getattr(operator, f"__{name}__")

    def method(self: ActsAsValue, *others: Any) -> Any:
        plain = [x.shared_value() if isinstance(x, ActsAsValue) else x for x in others]
        return compute(self.shared_value(), *plain)

    return method


def _reflected(name: str) -> Callable[..., Any]:
    compute = _BUILTIN.get(name) or getattr(operator, f"__{name}__")
    return lambda self, other: compute(other, self.shared_value())


# Those of the value, and not numpy's ufuncs as the mixin has them: ints of Python have as many bits
# as they need, and `*` with a matrix, also a sparse one, is a product of matrices.
for _name in (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
):
    setattr(ActsAsValue, f"__{_name}__", _operator(_name))
    setattr(ActsAsValue, f"__r{_name}__", _reflected(_name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert"):
    setattr(ActsAsValue, f"__{_name}__", _operator(_name))


def written_by(method: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Returns what a method of a ufunc writes into."""
    return inputs[:1] if method == "at" else kwargs.get("out", ())


class Mirrored(ActsAsValue):
    """One value that is the same on all replicas.

    What ``strategy.extended.reduce_to``, ``batch_reduce_to`` and ``broadcast_to`` give. It acts
    like the value in it: operators, numpy functions and attributes work.

    Parameters
    ----------
    value : object
        The value, the same on every rank.

    Notes
    -----
    Counterpart of ``tf.types.experimental.Mirrored``.

    Examples
    --------
    >>> float(Mirrored(2.0) + 1)
    3.0
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def value(self) -> Any:
        """The value in it."""
        return self._value

    def components(self, replica_ids: Sequence[int]) -> None:
        """Return None: all replicas share one value."""
        return

    def shared_value(self) -> Any:
        """Return the one value of all replicas."""
        return self._value

    def __repr__(self) -> str:
        return f"Mirrored:{self._value!r}"

    def __reduce__(self) -> Any:
        return Mirrored, (self._value,)

    def __hash__(self) -> int:
        try:
            return hash(self._value)  # it equals its value
        except TypeError:
            return object.__hash__(self)

    def __getattr__(self, name: str) -> Any:
        if name == "_value" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._value, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self._value, dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(out, Mirrored) for out in written_by(method, inputs, kwargs)):
            raise TypeError(
                "a Mirrored value can't be changed in place: make a new one, as in g = g * 2."
            )
        if isinstance(where := kwargs.get("where"), Mirrored):
            kwargs["where"] = where.value
        plain = [x.value if isinstance(x, Mirrored) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)


def per_replica(values: Sequence[Any], layout: Layout, *, are_rows: bool = False) -> PerReplica:
    """Returns the components of this rank's replicas; an error once these have moved.

    Parameters
    ----------
    values : sequence
        In the order of the replica ids.
    layout : Layout
        That of the strategy.
    are_rows : bool
        Whether they are those of a dataset: no two of them share memory, if they are two objects.
    """
    made = PerReplica(values, layout.local_replica_ids, layout.num_replicas)
    made._era, made._are_rows = layout.era, are_rows
    return made


def is_made_on_ranks(value: Any) -> bool:
    """Returns whether each rank has made its replicas' components: it may have no others.

    So of what `run` and datasets give, and of a variable that is synchronized on read.
    """
    if isinstance(value, PerReplica):
        return value._era is not _FOR_EVER
    return isinstance(value, DistributedValues) and value.components(()) is not None


def are_known_apart(value: PerReplica) -> bool:
    """Returns whether no two components share memory, without a look at that."""
    return value._are_rows and len({*map(id, value.values)}) == len(value.values)


def component_of(value: Any, replica_id: int, num_replicas: int) -> Any:
    """Returns what `value` stands for in a replica: for a PerReplica, its component.

    Raises
    ------
    ValueError
        There is no such component, or there are not `num_replicas` of them.
    """
    if isinstance(value, PerReplica):
        value.require(num_replicas)
        return value.components((replica_id,))[0]
    if isinstance(value, Mirrored):
        return value.value
    return value


def read_only(value: Any) -> Any:
    """Returns an array or record of numpy, or rows, to be read alone; anything else as it is.

    For what several replicas of a rank get: how many these are, depends on the layout.
    """
    if isinstance(value, IndexedSlices):
        return value.changed(read_only)
    if isinstance(value, (np.ndarray, np.void)):
        array = np.asanyarray(value).view()  # of a record its own memory
        array.flags.writeable = False
        return array if isinstance(value, np.ndarray) else array[()]
    return value


def local_results(
    value: Any, layout: Layout, replica_ids: Sequence[int] | None = None
) -> tuple[Any, ...]:
    """Returns the components of the nest `value` that are here; a nest for each replica.

    Those of all replicas where they are at hand, otherwise those of the local ones. A value that
    is not distributed, and no nest, comes back alone; what is mirrored, and a nest without
    distributed values, comes for each of `replica_ids`, by default the local ones.
    """
    leaves, structure = nest.flatten(value)
    local_replica_ids = layout.local_replica_ids
    held = []
    for leaf in leaves:
        if isinstance(leaf, PerReplica):
            held.append(leaf.replica_ids)
        elif isinstance(leaf, DistributedValues) and leaf.components(()) is not None:
            leaf.require(layout.num_replicas)
            held.append(local_replica_ids)
    if nest.structure_text(structure) == "*" and not isinstance(leaves[0], DistributedValues):
        return (leaves[0],)
    ids = min(held, key=len) if held else replica_ids or local_replica_ids
    rows = []
    for leaf in leaves:
        row = leaf.components(ids) if isinstance(leaf, DistributedValues) else [leaf] * len(ids)
        rows.append([leaf.shared_value()] * len(ids) if row is None else row)
    return tuple(nest.unflatten(structure, [row[i] for row in rows]) for i in range(len(ids)))
