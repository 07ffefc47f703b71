"""What a checkpoint has for the objects of a program: compared first, put back later."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from ..core import object_state
from ..core.abstract_variable import AbstractVariable
from ..core.array_libraries import library_of, written
from ..core.exceptions import RankLostError
from ..core.jax_nodes import JaxNode, is_function_in_node, opened_by_jax
from ..core.layout import Layout
from ..core.values import Mirrored, PerReplica, per_replica
from .array_kinds import kind_of
from .decoder import (
    SavedState,
    alike_of,
    array_name,
    decoded,
    is_bytes,
    mapping_items,
    replicas_name,
    state_of,
    tuple_items,
    variable_of,
)
from .index import Index
from .new_containers import can_be_made_anew, refilled, way_to_make
from .saved_values import PutBack, Reader, SavedValues
from .targets import Targets, copied

# More are counted only: a large module may have other names than another one.
_MOST_PLACES = 20


class Comparison:
    """The objects of a program beside what a checkpoint has for them.

    Nothing is changed until `put_back`; read only what names get that share one memory.

    Parameters
    ----------
    index : Index
        What the checkpoint has.
    objects : mapping
        What the program has.
    read : callable
        See `Reader`.
    layout : Layout
        That of the program.
    variables : mapping
        Those that the checkpoint knows by their identity: each comes back to where it was. It gets
        its value where `objects` has it once more.
    is_exact : bool
        Whether dicts and lists are to hold what the checkpoint has, no more and no less, where
        they have grown or shrunk since, and whether gradients of torch are none.

    Attributes
    ----------
    missing, unexpected, unfit : list of str
        What only the program has, what only the checkpoint has, and what has another shape, dtype
        or kind, in words.
    """

    def __init__(
        self,
        index: Index,
        objects: Mapping[str, Any],
        read: Reader,
        layout: Layout,
        *,
        variables: Mapping[str, AbstractVariable] = {},
        is_exact: bool = False,
    ) -> None:
        self._is_exact = is_exact
        self._index = index
        self._layout = layout
        self._read = read
        self._variables = variables
        self._saved = SavedValues(index, read, layout, variables)
        self._targets = Targets(index, read)
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.unfit: list[str] = []
        self._objects = dict(objects)
        self._put_back = self._mapping(self._objects, index.state, "")

    def put_back(self) -> dict[str, Any]:
        """Puts everything back that fits; returns the objects, with new ones for what can't change.

        Only once.

        Raises
        ------
        CheckpointError
            A file has changed since it was checked.
        """
        put_back = self._put_back
        if self._is_exact:
            self._targets.drop_gradients()
        # a cycle, and what holds the objects: what is replaced would live on
        del self._put_back, self._targets
        put_back()
        return self._objects

    def problems(self) -> str:
        """Returns what does not fit, in words; an empty text where all does."""
        kinds = [
            ("not in the checkpoint", self.missing),
            ("not in the program", self.unexpected),
            ("different", self.unfit),
        ]
        return "; ".join(f"{what}: {_listed(places)}" for what, places in kinds if places)

    def _match(self, live: Any, saved: Any, path: str) -> PutBack:
        """Returns what puts `live` back; where it does not fit, what leaves it as it is."""
        if (of_variable := variable_of(saved)) is not None:
            variable, saved = self._variables.get(of_variable[0]), of_variable[1]
            if variable is not None and not self._takes_place_of(variable, live):
                return lambda: variable
        if isinstance(live, PerReplica):
            return self._replicas(live, saved, path)
        if alike_of(saved) is not None:  # one object has the state of those that are the same
            saved = alike_of(saved)
        first = self._targets.place_of_another_state(live, saved, path)
        if first is not None:
            target, live = live, copied(live)
            if live is None:
                what = f"{path} is the same {type(target).__name__} as {first} here"
                self.unfit.append(f"{what}, and another one in the checkpoint")
                return lambda: target
        if object_state.has_state(live):
            return self._stateful(live, saved, path)
        if isinstance(live, AbstractVariable) and replicas_name(saved) is not None:
            return self._components(live, saved, path)
        if isinstance(live, Mirrored) and not isinstance(live.value, (np.ndarray, np.generic)):
            if replicas_name(saved) is not None:
                return self._other(live, saved, path, f"a {type(live.value).__name__}")
            put_back = self._match(live.value, saved, path)
            return lambda: Mirrored(put_back())
        if isinstance(live, (AbstractVariable, Mirrored, np.ndarray)) or library_of(live):
            return self._arrays(live, saved, path)
        if isinstance(live, Mapping):
            items = mapping_items(saved)
            if items is None or not (isinstance(live, MutableMapping) or can_be_made_anew(live)):
                return self._other(live, saved, path, f"a {type(live).__name__}")
            return self._mapping(live, items, path)
        if isinstance(live, (list, tuple)):
            return self._sequence(live, saved, path)
        if (node := opened_by_jax(live)) is not None:
            return self._node(live, node, saved, path)
        record = self._saved.record(saved)
        is_scalar = live is None or record is None or not record.shape
        is_plain = is_scalar and mapping_items(saved) is None and tuple_items(saved) is None
        if not is_plain or state_of(saved) is not None or replicas_name(saved) is not None:
            return self._other(live, saved, path, f"a {type(live).__name__}")
        load = self._saved.decoding(saved, path)
        if isinstance(live, bytearray) and is_bytes(saved):
            return lambda: bytearray(load())
        if isinstance(live, enum.Enum) and record is None:
            with contextlib.suppress(Exception):  # what is none of its members is what it is
                member = type(live)(load())
                return lambda: member
        return load

    def _takes_place_of(self, variable: AbstractVariable, live: Any) -> bool:
        """Returns whether `live` is a later variable for the same values.

        The program may hold it elsewhere, too.
        """
        return (
            isinstance(live, AbstractVariable)
            and self._variables.get(live.identity) is not live
            and (live.dtype, live.shape) == (variable.dtype, variable.shape)
            and live.is_mirrored == variable.is_mirrored
        )

    def _mapping(self, live: Mapping[Any, Any], saved: Mapping[Any, Any], path: str) -> PutBack:
        def where(key: Any) -> str:
            return f"{path}[{key!r}]" if path else str(key)

        matched: dict[Any, PutBack] = {}
        for key, item in live.items():
            if key in saved:
                matched[key] = self._match(item, saved[key], where(key))
            elif not self._is_exact:
                self.missing.append(where(key))
        added = [key for key in saved if key not in live]
        if self._is_exact:
            matched |= {key: self._added(saved[key], where(key)) for key in added}
        else:
            self.unexpected += map(where, added)
        if not isinstance(live, MutableMapping):
            make: Callable[[dict[Any, Any]], Any] = type(live)
            return lambda: make({key: put_back_item() for key, put_back_item in matched.items()})

        def put_back() -> None:
            if self._is_exact and list(live) != list(saved):
                live.clear()
            for key in saved if self._is_exact else matched:
                live[key] = matched[key]()

        return _changing(live, put_back)

    def _sequence(self, live: Any, saved: Any, path: str) -> PutBack:
        items = tuple_items(saved)
        if self._is_exact and items is not None and isinstance(live, list) != (items is saved):
            live = list(live) if items is saved else tuple(live)
        if isinstance(live, list) and items is not None and _are_plain([*live, *items]):
            return lambda: refilled(live, items)
        can_grow = self._is_exact and isinstance(live, list)
        if items is None or (len(items) != len(live) and not can_grow):
            return self._other(live, saved, path, f"a {type(live).__name__} of {len(live)}")
        if isinstance(live, tuple) and way_to_make(live) is None:
            what = f"a {type(live).__name__} that can't be made of its items"
            return self._other(live, saved, path, what)
        matched = [
            self._match(item, other, f"{path}[{i}]")
            for i, (item, other) in enumerate(zip(live, items, strict=not can_grow))
        ]
        matched += [
            self._added(item, f"{path}[{i}]")
            for i, item in enumerate(items[len(live) :], len(live))
        ]
        return lambda: refilled(live, [put_back() for put_back in matched])

    def _node(self, live: Any, node: JaxNode, saved: Any, path: str) -> PutBack:
        items = tuple_items(saved)
        if items is None or len(items) != len(node.children):
            what = f"a {type(live).__name__} of {len(node.children)}"
            return self._other(live, saved, path, what)
        # functions stay those of the program
        matched = {
            i: self._match(child, item, f"{path}.{key}")
            for i, (key, child, item) in enumerate(
                zip(node.make.keys, node.children, items, strict=True)
            )
            if not is_function_in_node(child)
        }
        return lambda: node.make(
            [matched[i]() if i in matched else child for i, child in enumerate(node.children)]
        )

    def _stateful(self, live: Any, saved: Any, path: str) -> PutBack:
        state = state_of(saved)
        if state is None:
            return self._differs(live, saved, path, f"a {type(live).__name__}")
        if object_state.is_module(live):
            return self._module(live, state, path)
        if difference := state.difference_from(live):
            self.unfit.append(f"{path} {difference}")
            return lambda: live
        load = self._saved.decoding(state.state, path)
        return _changing(live, lambda: object_state.put_state(live, load()))

    def _module(self, live: Any, saved: SavedState, path: str) -> PutBack:
        """Returns what gives a module of torch its tensors, those that fit."""
        here, there = object_state.state_in(live), mapping_items(saved.state)
        if there is None or mapping_items(saved.versions or {}) is None:
            return self._differs(live, saved.state, path, f"a {type(live).__name__}")
        unfit = set()
        for name in [name for name in here if name in there]:
            if library_of(here[name]) is None or object_state.is_lazy(here[name]):
                continue
            kind = kind_of(here[name], f"{path}[{name!r}]")
            if self._saved.kind(there[name]) != kind:
                self._differs(here[name], there[name], f"{path}[{name!r}]", str(kind))
                unfit.add(name)
        missing = [name for name in here if name not in there]
        unexpected = [name for name in there if name not in here]
        self.missing += [f"{path}[{name!r}]" for name in missing]
        self.unexpected += [f"{path}[{name!r}]" for name in unexpected]

        loads = {n: self._saved.decoding(item, path) for n, item in there.items() if n not in unfit}

        def put_back() -> None:
            state = collections.OrderedDict((name, load()) for name, load in loads.items())
            if saved.versions:
                state._metadata = decoded(saved.versions, self._saved.load)  # type: ignore[attr-defined]
            if unfit or missing or unexpected:
                live.load_state_dict(state, strict=False)  # it takes what it finds there
            else:
                object_state.put_state(live, state)

        return _changing(live, put_back)

    def _replicas(self, live: PerReplica, saved: Any, path: str) -> PutBack:
        """Returns what makes a `PerReplica` anew; what its parts were before says nothing.

        Objects in it are kept, and get their state.
        """
        number, ids = self._layout.num_replicas, self._layout.local_replica_ids
        is_state = alike_of(saved) is not None or state_of(saved) is not None
        parts = self._index.of_replicas.get(replicas_name(saved) or "")
        if is_state:
            parts = dict.fromkeys(map(str, ids), saved)
        elif parts is None or self._index.num_replicas != number:
            return self._other(live, saved, path, f"a PerReplica of {number} replicas")
        mine = [parts[str(i)] for i in ids]
        if all(map(self._saved.is_data, mine)) and not _has_nodes(live, ids):
            matched = [self._saved.decoding(part, path) for part in mine]
        else:
            matched = [
                self._match(component, part, path)
                for component, part in zip(live.components(ids), mine, strict=True)
            ]
        return lambda: per_replica([put_back() for put_back in matched], self._layout)

    def _components(self, live: Any, saved: Any, path: str) -> PutBack:
        """Returns what gives a variable the components of this rank's replicas."""
        number, ids = self._layout.num_replicas, self._layout.local_replica_ids
        if live.is_mirrored or not self._saved.is_data(saved):
            return self._differs(live, saved, path, f"a variable of {number} replicas")
        parts = self._index.of_replicas[replicas_name(saved) or ""]
        here, there = kind_of(live, path), [*map(self._saved.kind, parts.values())]
        if any(kind != here for kind in there):
            of_parts = _listed([str(kind or "no array") for kind in there])
            text = f"{path} has {here} for each replica here, and {of_parts} in the checkpoint"
            self.unfit.append(text)
            return lambda: live

        def put_back() -> None:
            live.put_back_components({i: decoded(parts[str(i)], self._saved.load) for i in ids})

        return _changing(live, put_back)

    def _other(self, live: Any, saved: Any, path: str, here: str) -> PutBack:
        """Returns what replaces a value by one of another kind, where that loses no object.

        `here` says what it is, for the error.
        """
        if self._is_exact and self._saved.is_data(saved) and not _has_objects(live):
            return self._saved.decoding(saved, path)
        return self._differs(live, saved, path, here)

    def _added(self, saved: Any, path: str) -> PutBack:
        """Returns what makes a value anew of which the program has nothing any more."""
        if self._saved.is_data(saved):
            return self._saved.decoding(saved, path)
        return self._differs(None, saved, path, "gone")

    def _arrays(self, live: Any, saved: Any, path: str) -> PutBack:
        like = live.value if isinstance(live, Mirrored) else live
        kind = kind_of(like, path)
        if self._saved.kind(saved) != kind:
            return self._other(live, saved, path, str(kind))
        name = array_name(saved) or ""
        if library_of(live) is not None:
            return lambda: written(live, self._saved.load(name))
        fill = functools.partial(self._read, name)
        is_written = isinstance(live, np.ndarray) and live.flags.writeable
        # A spare may have one in another order than the ranks with which it goes back to a commit.
        if is_written and not (self._is_exact and self._saved.is_reordered(live, saved)):
            return _changing(live, lambda: fill(live))
        if isinstance(live, AbstractVariable):
            return _changing(live, lambda: live.put_back(fill))

        def replace() -> Any:
            value = self._saved.load(name)
            if isinstance(live, Mirrored):
                return Mirrored(value[()] if isinstance(like, np.generic) else value)
            return value

        return replace

    def _differs(self, live: Any, saved: Any, path: str, here: str) -> PutBack:
        """Notes what does not fit; returns what leaves it as it is."""
        kind = self._saved.kind(saved)
        if kind is not None:
            there = str(kind)
        else:
            items, values = mapping_items(saved), tuple_items(saved)
            there = "a mapping" if items is not None else f"{saved!r:.60}"
            if values is not None:
                there = f"{len(values)} items"
            if replicas_name(saved) is not None:
                there = f"a PerReplica of {self._index.num_replicas} replicas"
            if state_of(saved) is not None:
                there = "the state of an object"
            if alike_of(saved) is not None:
                there = "the state of an object of each replica"
        self.unfit.append(f"{path} is {here} here, and {there} in the checkpoint")
        return lambda: live


def _changing(live: Any, change: Callable[[], None]) -> PutBack:
    """Returns what calls `change`, by which an object gets its state, and keeps the object."""

    def put_back() -> Any:
        change()
        return live

    return put_back


def variables_in(live: Any) -> Iterator[AbstractVariable]:
    """Returns the variables in a nest, however deep, of which nothing need be made anew."""
    found, opened = [live], set()
    for value in found:
        if isinstance(value, AbstractVariable):
            yield value
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in opened:
            opened.add(id(value))  # a list may contain itself
            found += value.values() if isinstance(value, Mapping) else value


def _has_nodes(live: PerReplica, replica_ids: Sequence[int]) -> bool:
    """Returns whether components are what JAX alone makes anew of its parts, as sparse matrices."""
    try:
        components = live.components(replica_ids)
    except (RankLostError, ValueError):  # replicas have moved since
        return False
    return any(opened_by_jax(component) is not None for component in components)


def _has_objects(live: Any) -> bool:
    """Returns whether there are variables, or objects with a state, in a nest."""
    for _, leaf in object_state.places_of(live):
        if isinstance(leaf, AbstractVariable) or object_state.has_state(leaf):
            return True
        # what replicas had before a loss is not to be used, but looked at
        if isinstance(leaf, PerReplica) and any(map(_has_objects, leaf._values)):
            return True
    return False


def _listed(places: list[str]) -> str:
    different = list(dict.fromkeys(places))  # objects of several replicas have the same ones
    more = len(different) - _MOST_PLACES
    return ", ".join(different[:_MOST_PLACES]) + (f" and {more} more" if more > 0 else "")


def _are_plain(items: list[Any]) -> bool:
    return all(item is None or type(item) in (bool, int, float, str) for item in items)
