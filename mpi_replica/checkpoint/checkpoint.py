"""Checkpoints: the state of a program in files, for any number of ranks."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from ..collectives.agreement.site import CallSite
from ..collectives.strategy_base import StrategyBase
from ..collectives.verify import Verification
from ..core.abstract_variable import AbstractVariable
from ..core.context import current_strategy, open_strategies, require_cross_replica
from ..core.exceptions import CheckpointError, ContextError
from ..core.object_state import leaves_of
from ..core.options import CommunicationOptions, VariableAggregation
from ..core.values import Mirrored, PerReplica
from ..ranks.watch.span import span
from .comparison import Comparison, variables_in
from .encoder import Encoder
from .index import Index, all_generators, checkpoint_path
from .object_places import saved_once
from .restore import Restoring
from .save import Own, Saving
from .saved_values import Reader

_log = logging.getLogger("mpi_replica")

# The attributes that the package sets, of an `ElasticState`, too.
_OWN = frozenset({"_given_strategy", "_is_exact", "_manager", "_commit"})


class Checkpoint:
    """The state of a program that is saved and restored together.

    The random numbers of the strategy (``ctx.rng``, ``strategy.rng``) are part of it.

    Parameters
    ----------
    strategy : Strategy, optional
        By position. Default: that of the variables; the current one where there are none. Where
        that is the default strategy, although another one is open, it must be given.
    **objects
        Each is an attribute of the checkpoint, too. Variables; nests (dicts, lists, tuples) of
        arrays of numpy, torch, JAX and others, numbers, texts, bytes and None; generators of torch
        and numpy; objects with ``state_dict()`` and ``load_state_dict()``, as those of torch and
        as distributed datasets and their iterators, which go on with the batch after the last one
        that was taken. All these must be the same on all ranks, but for variables. A `PerReplica`
        of such nests: a value for each replica, also of generators; of other objects, the same for
        all.

    Raises
    ------
    ValueError
        A name is that of a method, or begins with _ or $; also where it is assigned later. Where it
        is saved or restored: its variables belong to several strategies.
    TypeError
        `strategy` is none.

    Notes
    -----
    A checkpoint is restored on any number of ranks and, if it has no `PerReplica` but of objects,
    any number of replicas; also one object where it had one for each replica, and the other way
    round. Its files are ``path.index`` and
    ``path.*.data-*``, and while it is saved ``path.*.index.new``, in a folder that all hosts share.
    They hold no pickles: reading them runs no code. Counterpart of ``tf.train.Checkpoint``.

    Examples
    --------
    >>> import numpy as np, tempfile, mpi_replica as mr
    >>> strategy = mr.MPIStrategy()
    >>> checkpoint = mr.Checkpoint(strategy, step=3, weights={"w": np.arange(2.0)})
    >>> path = checkpoint.save(f"{tempfile.mkdtemp()}/trained")
    >>> checkpoint.step, checkpoint.weights["w"][:] = 0, 0.0
    >>> checkpoint.restore(path)
    >>> checkpoint.step, checkpoint.weights["w"]
    (3, array([0., 1.]))
    """

    def __init__(self, strategy: StrategyBase | None = None, /, **objects: Any) -> None:
        for name in sorted(objects):
            self._require_free(name)
        if strategy is not None and not isinstance(strategy, StrategyBase):
            raise TypeError(
                f"Checkpoint got {strategy!r}, which is no strategy. Write mr.Checkpoint(strategy,"
                " name=object); the path is given to save and restore."
            )
        self._given_strategy = strategy
        self.__dict__.update(objects)

    #: Whether dicts and lists that have grown or shrunk since are made what they were.
    _is_exact = False
    #: A weak reference to the manager that was made for it last.
    _manager: Callable[[], Any] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__ and name not in _OWN:
            # A class of the program's own may have properties, and keep what is not to be saved.
            if type(self).__module__.partition(".")[0] == __name__.partition(".")[0]:
                self._require_free(name)
        super().__setattr__(name, value)

    def _require_free(self, name: str) -> None:
        """Raises where it is no name for an object: it would not be saved, or hide a method."""
        if hasattr(type(self), name) or name.startswith(("_", "$")):
            raise ValueError(
                f"Checkpoint can't have an object named {name!r}: the names of its methods, and"
                " those that begin with _ or $, are its own. Give it another one."
            )

    @property
    def _objects(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def _replace(self, objects: Mapping[str, Any]) -> None:
        """Has these objects alone, in their order."""
        for name in self._objects:
            del self.__dict__[name]
        self.__dict__.update(objects)

    @span("Checkpoint.save", kind="checkpoint")
    def save(self, path: str | os.PathLike[str]) -> str:
        """Save the objects; return `path`.

        Collective: all ranks call it, in cross-replica context.

        Parameters
        ----------
        path : path_like
            The same on all ranks. Folders that are missing are made. A checkpoint that is there
            is replaced at once, when the new one is on disk: there is always the one or the other.

        Returns
        -------
        str
            `path` as a string, which `restore` takes.

        Raises
        ------
        CheckpointError
            A file can't be written, or the index, in which numbers, texts and bytes stand, is
            larger than 1 GiB; on every rank. The older checkpoint is as it was.
        TypeError, ValueError
            An object can't be saved, or `path` is none; on every rank, and before anything is
            written.
        DivergenceError
            What is saved once is not the same on all replicas, or ranks: modules, optimizers,
            generators, and what a `PerReplica` of objects holds but for generators. Names the
            parameter.
        StructureMismatchError, CollectiveMismatchError
            The ranks have other objects, or made different calls.

        Notes
        -----
        Each rank writes about as many bytes, and what belongs to its own replicas: their random
        numbers and the components of each `PerReplica`. Variables that are synchronized on read are
        saved as they read from above, as in tf: SUM is saved summed, and reads the same bits on any
        number of replicas; MEAN, then that of equal numbers, may differ in its last digit; NONE
        can't be saved. Memory: a few MiB beyond the state, and the values that were combined for
        that.

        A save that is broken off, by a rank that is killed, leaves files that belong to no
        checkpoint: the next save to this path removes them, where the file system has locks, by
        which it sees that no job works on them.

        Messages: five of 256 bytes a rank, and twice an Allgather of 8 bytes and an Allgatherv: a
        name for the files, and what the index says of the share of each rank. One more of 256 bytes
        where objects are compared, as `verify` does it. Counterpart of
        ``tf.train.Checkpoint.write``.

        Examples
        --------
        >>> import tempfile
        >>> checkpoint = mr.Checkpoint(mr.MPIStrategy(), step=3)
        >>> checkpoint.save(f"{tempfile.mkdtemp()}/trained").endswith("trained")
        True
        """
        strategy = self.strategy
        require_cross_replica(strategy, "Checkpoint.save")
        engine = strategy.engine
        # Reading a variable that is synchronized on read is a collective call of its own.
        on_read = [v for v in self._variables() if not v.is_mirrored]
        combined = {id(v): v.value() for v in on_read if v.aggregation is not _NO_AGGREGATION}

        def plain(value: Any) -> Any:
            if isinstance(value, AbstractVariable):
                if not value.is_mirrored and id(value) not in combined:
                    is_none = cast(Any, value).aggregation is _NO_AGGREGATION
                    raise ValueError(_NO_VALUE if is_none else _NO_VALUE_HERE)
                shared = combined[id(value)] if id(value) in combined else value.shared_value()
                return np.asarray(shared, value.dtype)  # numpy's scalars have one byte order
            return value.value if isinstance(value, Mirrored) else value

        ids = engine.layout.local_replica_ids

        def components(value: Any) -> dict[int, Any] | None:
            if not isinstance(value, PerReplica):
                return None
            value.require(engine.layout.num_replicas)
            return dict(zip(ids, value.components(ids), strict=True))

        encoder = Encoder(plain, components)
        call = engine.make("Checkpoint.save", None, self._saving, path, encoder)
        if call.error is None:
            of_replicas, of_ranks = saved_once(self._objects, "checkpoint")
            require_same(strategy, "Checkpoint.save", {**of_replicas, **of_ranks})
        engine.cross_replica(call)
        return os.fspath(path)

    def _saving(
        self,
        site: CallSite,
        options: CommunicationOptions,
        path: str | os.PathLike[str],
        encoder: Encoder,
    ) -> Saving:
        """Returns the call that saves the objects as they are now."""
        place = checkpoint_path(path)
        state = {
            name: encoder.encode(value, f"checkpoint.{name}")
            for name, value in self._objects.items()
        }
        ids = self.strategy.engine.layout.local_replica_ids
        own = Own(self.strategy.generators.state(ids), encoder.of_replicas, encoder.own_arrays)
        return Saving(site, options, place, state, encoder.arrays, own)

    @span("Checkpoint.restore", kind="checkpoint")
    def restore(self, path: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Put the objects back to what `save` saved.

        Collective: all ranks call it, in cross-replica context, on any number of ranks.

        Parameters
        ----------
        path : path_like
            What was given to `save`.
        strict : bool, default True
            Whether it is an error if something is missing, too much, or of another shape or dtype.
            Otherwise what fits is restored, and a warning names the rest. Numbers, texts, bytes and
            None take the place of each other, and lists of nothing but numbers, texts and None may
            have another length.

        Raises
        ------
        CheckpointError
            A file is missing, torn or corrupt, or something does not fit; on every rank, and
            before anything has changed. Names the file, or what does not fit.
        TypeError, ValueError
            `path` is none; on every rank.
        Exception
            What ``load_state_dict`` of an object raised on any rank. Variables, arrays, dicts,
            lists and other objects may then be restored or not, and differ between ranks. The
            attributes and the random numbers are the old ones. Restore again before going on.

        Notes
        -----
        Variables, writable arrays, tensors, dicts, lists and objects are changed; what can't be
        changed (numbers, texts, tuples, read-only mappings, arrays of JAX) is a new attribute; also
        a bytearray, which is bytes in the state of an object and in a `PerReplica`. So is an array,
        dict or list that another name holds too, where other values were saved of that. Where
        arrays share a part of their memory only, it has what was saved of the last one. All bytes
        are checked before, each by one rank.

        Memory: a few MiB beyond the state. What is not changed but made anew is there twice: values
        of variables that the program still holds, read-only arrays, `Mirrored` values, and what an
        object's ``load_state_dict`` gets. An array that two names hold is read twice more, to see
        whether both have been saved of the same values.

        Messages: four of 256 bytes a rank, an Allgather of 8 bytes and an Allgatherv, by which all
        get the index from rank 0. Counterpart of ``tf.train.Checkpoint.read``.

        Examples
        --------
        >>> import tempfile
        >>> checkpoint = mr.Checkpoint(mr.MPIStrategy(), step=3)
        >>> path = checkpoint.save(f"{tempfile.mkdtemp()}/trained")
        >>> checkpoint.step = 0
        >>> checkpoint.restore(path)
        >>> checkpoint.step
        3
        """
        strategy = self.strategy
        require_cross_replica(strategy, "Checkpoint.restore")
        engine = strategy.engine
        if engine.is_spare:  # it gets its state with its replicas
            return

        problems = ""

        def match(index: Index, read: Reader) -> Comparison:
            nonlocal problems
            comparison = Comparison(
                index, self._objects, read, engine.layout, is_exact=self._is_exact
            )
            problems = comparison.problems()
            if problems and strict:
                raise CheckpointError(
                    f"{os.fspath(path)} does not fit this program. {problems}. Restore with"
                    " strict=False to take what fits."
                )
            return comparison

        def finish(index: Index, objects: dict[str, Any]) -> None:
            self._replace(objects)
            restored = [leaf for one in objects.values() for _, leaf in leaves_of(one)]
            for dataset in engine.datasets.values():
                dataset.go_on_behind(restored)
            _restore_generators(strategy, index)

        is_reader = engine.layout.rank == 0
        engine.cross_replica(
            engine.make("Checkpoint.restore", None, Restoring, path, match, finish, is_reader)
        )
        if problems and is_reader:
            with contextlib.suppress(Exception):  # logging fails where stderr is closed
                _log.warning("%s is restored but for: %s.", os.fspath(path), problems)

    def _variables(self) -> list[Any]:
        return list(variables_in(self._objects))

    @property
    def strategy(self) -> StrategyBase:
        """The strategy whose ranks save and restore it.

        Raises
        ------
        ContextError
            It can't be told which one: none was given, there are no variables, and the default
            strategy holds here although another one is open.
        ValueError
            None was given, and the variables belong to several ones.
        """
        if self._given_strategy is not None:
            return self._given_strategy
        strategies = {id(v.strategy): v.strategy for v in self._variables()}
        if len(strategies) > 1:
            raise ValueError(
                "the variables of a Checkpoint belong to several strategies. Make one for each."
            )
        strategy = next(iter(strategies.values()), None) or current_strategy()
        # Each rank would save for itself, to one path, and not the random numbers that it draws.
        if strategy.is_default and open_strategies:
            raise ContextError(
                "a Checkpoint without variables that were made in the scope of a strategy does not"
                " know its strategy. Pass it: mr.Checkpoint(strategy, ...)."
            )
        return cast("StrategyBase", strategy)

    def __repr__(self) -> str:
        return f"<mr.Checkpoint of {', '.join(self._objects)}>"


_NO_AGGREGATION = VariableAggregation.NONE
_NO_VALUE = (
    "it is synchronized on read with aggregation NONE, so that there is no one value to save. Give"
    " it another aggregation, or save strategy.run(variable.value) in its place, which is restored"
    " into the variable."
)
_NO_VALUE_HERE = (
    "it is synchronized on read, and only a call of all ranks knows its value, which the state of"
    " an object can't make. Give the variable to the Checkpoint, too, by a name of its own."
)


def require_same(strategy: StrategyBase, kind: str, objects: Mapping[str, Any]) -> None:
    """Raises where objects of which one state is saved are not the same everywhere. Collective.

    Parameters
    ----------
    strategy : Strategy
    kind : str
        The name of the call.
    objects : mapping
        By place; without any, nothing is sent.

    Raises
    ------
    DivergenceError
        On every rank; names the parameter and the replicas.
    """
    if objects:
        engine = strategy.engine
        call = engine.make(
            kind,
            None,
            Verification,
            objects,
            "",
            lambda value: None,
            engine.layout,
            caller=kind,
            remedy=_TO_DIFFER,
        )
        engine.cross_replica(call)


_TO_DIFFER = (
    " What is to differ between replicas, as plain batch norm's buffers, is saved where the object"
    " is given as a PerReplica of its state: strategy.run(lambda one: one.state_dict(), ...)."
)


def _restore_generators(strategy: StrategyBase, index: Index) -> None:
    """Goes on with the random numbers of each replica, wherever it was."""
    generators = all_generators(index.of_ranks)
    mine = {str(i) for i in strategy.engine.layout.local_replica_ids}
    replicas = {name: state for name, state in generators["replicas"].items() if name in mine}
    strategy.generators.restore({**generators, "replicas": replicas})
