"""The ranks of a job that are left: who they are, and how they come together anew after a loss.

A strategy's transport is of the ranks that host replicas. Behind it stands the world: those ranks
and the spares that wait. Only a world survives a loss, by ULFM's ``Revoke``, ``Shrink`` and
``Agree``, which work although ranks are dead, and give all living ones the same result.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import getpid
from time import sleep
from typing import Any, NamedTuple, TypeVar, cast

from ..core.exceptions import RankLostError, mark_reporter
from ..core.layout import compressed
from .abort import abort_job
from .communicators import ranks_in_world
from .library_facts import is_fault_tolerant
from .single import WaitingTransport
from .transport import Transport
from .ulfm import agree, agree_in_steps, all_gather_objects, is_loss, shrink

T = TypeVar("T")

# What the ranks have in common after an attempt to come together.
_SUCCEEDED, _MAY_TRY_AGAIN = 1, 2
# What those of a world have in common when they agree for the last time, before they come together
# anew or when their programs have ended.
_GOES_ON, _HAS_ENDED = 0, 1

# A spare looks so often whether it is needed: its core is for others.
_LOOK_SECONDS = 0.003
_TAG_OF_END = 1
# Sent at once, whether the spare receives it or not.
_MOST_LETTERS = 500
#: What is said to spares that still wait when the program ends well on the others.
NO_FURTHER_CALL = "without a further call of run_elastic"


class Member(NamedTuple):
    """A process of the job."""

    #: Its rank when the strategy was made.
    first_rank: int
    host: str
    pid: int


class _Introduction(NamedTuple):
    """What a rank says of itself when the ranks come together."""

    member: Member
    num_spares: int
    #: Its rank in the world that they leave.
    rank: int
    #: Why its program has ended, "" where nothing is wrong; None while it goes on.
    farewell: str | None


class Dismissal(NamedTuple):
    """What spares are told: how the ranks that host replicas have come to their end."""

    #: What has gone wrong; empty where nothing has.
    text: str
    #: The exit status with which they end; None where they go on.
    status: int | None = None
    #: How many of what was made there.
    num_made: Mapping[str, int] = {}

    @property
    def is_good(self) -> bool:
        """Whether nothing has gone wrong, and they go on."""
        return not self.text and self.status is None


class Survivors:
    """The living ranks of a strategy's job, the waiting ones among them.

    Its communicators are never freed where ranks agree on them: see `MPITransport.close`.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    communicator : Intracomm
        Of all ranks; collective over it. Duplicated.
    num_spares : int
        How many ranks at its end wait.
    make : callable
        Makes the transport of a communicator, given that and whether the library goes on without
        a lost rank.
    """

    def __init__(
        self, mpi: Any, communicator: Any, num_spares: int, make: Callable[..., Transport]
    ) -> None:
        self._mpi = mpi
        self._make = make
        #: Whether the library goes on without a lost rank.
        self.is_fault_tolerant = is_fault_tolerant(mpi)
        #: How many ranks the job was started with.
        self.first_size: int = communicator.Get_size()
        self._num_spares = num_spares
        self._world = communicator
        #: Those in the world of MPI, ascending; empty where processes may be of another one.
        self.ranks_in_world = ranks_in_world(mpi, communicator)
        self.rank_in_world: int = mpi.COMM_WORLD.Get_rank()
        self._is_own = False  # whether `_world` is a duplicate
        self._first_rank: int = communicator.Get_rank()
        # As `_Introduction` has it.
        self._farewell: str | None = None
        #: Whether all living ranks have agreed that they can't go on.
        self.is_over = False
        #: The rank of this process among all that live, and how many those are.
        self.rank, self.size = self._first_rank, self.first_size
        #: The transport of the ranks that host replicas; None where this rank waits.
        self.transport: Transport | None = None
        #: The living ranks in the order of their ranks, those that wait last.
        self.members: tuple[Member, ...] = ()
        #: Spares that were found dead when they were dismissed: nobody else meets them.
        self.lost_spares: set[Member] = set()

    def come_together(self, begin: Callable[[Transport | None], T]) -> T:
        """Leaves the dead behind, and returns what `begin` gives on each rank. Collective.

        It is tried again where another rank is lost meanwhile.

        Parameters
        ----------
        begin : callable
            Called with the new transport, or None where this rank waits.

        Raises
        ------
        Exception
            What `begin` raised on this rank.
        RankLostError
            It raised something on another one, or the program has ended there.
        """
        before = self.rank
        while True:
            renewed = self._attempt(self._renew, before)
            if renewed is None:
                continue
            problem, active = renewed[0]
            if problem is not None:  # on all ranks, and none of them needs to be woken
                self.is_over = self.is_fault_tolerant
                raise problem
            made = self._attempt(lambda active: begin(self._make_transport(active)), active)
            if made is not None:
                return made[0]

    def _attempt(self, attempt: Callable[[Any], T], given: Any) -> tuple[T] | None:
        """Returns what `attempt` makes of `given`; None on all ranks where some met a loss in it.

        Another error of any rank is one of all.
        """
        if not self.is_fault_tolerant:
            return (attempt(given),)
        problem: BaseException | None = None
        word = _SUCCEEDED | _MAY_TRY_AGAIN
        try:
            made = attempt(given)
        except BaseException as error:
            problem = error
            word = _MAY_TRY_AGAIN if self._is_of_a_loss(error) else 0
            self.revoke()
        word = self._agree(word)
        if not word & _MAY_TRY_AGAIN:
            self.is_over = True
            raise problem or RankLostError(
                "the ranks that are left could not go on: an error came up on another one,"
                " which prints it."
            )
        return (made,) if word & _SUCCEEDED else None

    def _is_of_a_loss(self, error: BaseException) -> bool:
        loss = None if self.transport is None else self.transport.loss
        if error is loss or is_loss(self._mpi, error, self._world):
            return True
        # What `revoke` has ended need not come up as an error of MPI's.
        return isinstance(error, Exception) and self._world.Is_revoked()

    def _renew(self, before: int) -> tuple[Exception | None, Any]:
        """Makes a world of the ranks that live; returns what speaks against it, alike on all.

        Beside it, the communicator of those that host replicas, or null where this one waits. All
        must have it before one may use it: a split can fail on some ranks alone. `before` is what
        the rank of this one was.
        """
        if self.is_fault_tolerant:
            # Unlike a duplicate it can be had where a rank is dead already.
            self._world = shrink(self._world)
            # Who revokes it while others are still in that call ends them (Open MPI 5.0.11: a
            # segmentation fault in ompi_comm_revoke_local).
            self._world.Set_errhandler(self._mpi.ERRORS_RETURN)
            self._agree(_GOES_ON)
        elif not self._is_own:
            self._world = self._world.Dup()
        self._is_own = True
        self._world.Set_errhandler(self._mpi.ERRORS_RETURN)
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self.transport = None
        mine = Member(self._first_rank, self._mpi.Get_processor_name(), getpid())
        introduction = _Introduction(mine, self._num_spares, before, self._farewell)
        ranks: list[_Introduction] = all_gather_objects(self._world, introduction)
        self.members = tuple(one.member for one in ranks)
        wrong = self._wrong_spares([one.num_spares for one in ranks])
        problem = wrong or _farewell_error(ranks, before)
        active = self._world
        if problem is None and (self.is_fault_tolerant or self._num_spares):
            color = 0 if self.rank < self.num_active else self._mpi.UNDEFINED
            active = self._world.Split(color, self.rank)
        return problem, active

    def _make_transport(self, active: Any) -> Transport | None:
        """Makes the transport of the ranks that host replicas; None where this one waits."""
        if active != self._mpi.COMM_NULL:
            try:
                self.transport = self._make(active, is_fault_tolerant=self.is_fault_tolerant)
            except BaseException:
                if self.is_fault_tolerant:
                    active.Revoke()  # others may wait in it, and `revoke` does not know it
                raise
        return self.transport

    def waiting_transport(self) -> Transport:
        """Returns the transport of a rank that hosts no replicas."""
        _, hosts, pids = zip(*self.members, strict=True)
        return WaitingTransport(self.rank, hosts, pids, self.abort)

    @property
    def num_active(self) -> int:
        """How many ranks host replicas, where so many live."""
        return self.first_size - self._num_spares

    def _wrong_spares(self, numbers: Sequence[int]) -> ValueError | None:
        least, most = min(numbers), max(numbers)
        if least < 0:
            return ValueError(
                "spares, or MPI_REPLICA_SPARES where that is not given, must be an int, 0 or more;"
                f" it is not on rank {numbers.index(least)}."
            )
        if least != most:
            return ValueError(
                f"spares differs between ranks: {least} and {most}. Give the same on all."
            )
        if self._num_spares >= self.first_size:
            return ValueError(
                f"spares={self._num_spares} leaves none of the {self.first_size} ranks to host"
                " replicas. Start more ranks, or ask for fewer spares."
            )
        return None

    def call_together(self) -> None:
        """Wakes all living ranks for `come_together`, wherever they wait or have come to their end.

        Collective: each of them does it when it has met the loss, or comes to `part`.
        """
        if self.transport is not None:
            self.revoke()
            if not self.transport.has_told_loss:
                self.transport.agree(0)  # others may be at a meeting
            self.transport.steps += 1  # the watcher reports what follows as a wait, too
        self._agree(_GOES_ON)

    def part(self) -> Iterator[None]:
        """Yields until nobody needs this rank any more, whose program has ended. Collective.

        Only when it has ended on all living ranks, none can meet a loss that makes them come
        together. Where they do, this rank is with them, and can't go on.
        """
        if self.is_over or not self.is_fault_tolerant:
            return
        if self._farewell is None:
            self._farewell = ""
        if self.transport is not None and not self.transport.has_told_loss:
            yield from agree_in_steps(self._mpi, self.transport.communicator, 0)
        word = yield from agree_in_steps(self._mpi, self._world, _HAS_ENDED)
        if word != _HAS_ENDED:
            with contextlib.suppress(RankLostError):
                self.come_together(lambda _: None)

    def _agree(self, word: int) -> int:
        """Returns the bits that the words of all living ranks have in common."""
        return agree(self._mpi, self._world, word)

    def share(self, value: Any) -> Any:
        """Returns what the first rank gives, also to those that wait. Collective."""
        return value if self.size <= self.num_active else self._world.bcast(value)

    def revoke(self) -> None:
        """Wakes all ranks, wherever they wait, for `come_together`. Not collective."""
        if self.transport is not None:
            self.transport.revoke()
        self._world.Revoke()

    def wait(self, call: int) -> Dismissal | None:
        """Waits, as a spare, without using the core.

        Parameters
        ----------
        call : int
            Which call of ``run_elastic`` this is. What is said of those before came too late.

        Returns
        -------
        Dismissal or None
            What a rank said at the end; None where a rank was lost: `come_together` is next.
        """
        while True:
            num_lost = 0
            for rank in range(self.num_active):
                try:
                    if self._world.Iprobe(rank, _TAG_OF_END):
                        letter = self._world.recv(source=rank, tag=_TAG_OF_END)
                        of_call, end = cast("tuple[float, Dismissal]", letter)
                        if of_call >= call:
                            if end.is_good:
                                self._hear_the_others(rank, call)
                            return end
                except self._mpi.Exception as error:
                    if not is_loss(self._mpi, error):
                        raise
                    num_lost += 1
                    if error.Get_error_class() == self._mpi.ERR_REVOKED:
                        return None
            if num_lost == self.num_active:  # nobody else is left to wake the spares
                self.revoke()
                return None
            sleep(_LOOK_SECONDS)

    def _hear_the_others(self, first: int, call: int) -> None:
        """Receives what the other ranks say at a good end: they wait until it is heard."""
        for rank in range(self.num_active):
            of_call = call if rank == first else 0
            try:
                while of_call < call:  # what it said of calls before may come first
                    of_call, _ = self._world.recv(source=rank, tag=_TAG_OF_END)
            except self._mpi.Exception as error:
                if not is_loss(self._mpi, error):
                    raise

    def dismiss(self, call: float, end: Dismissal) -> Iterator[int]:
        """Tells the spares that the others have come to their end. Every rank does it: one may die.

        At a good end they are waited for: one that has not heard would take the next call of
        `run_elastic` for this one.

        Parameters
        ----------
        call : float
            Which call of `run_elastic` has come to it, as all ranks count them; infinite for the
            end of the program.
        end : Dismissal
            What is said.

        Yields
        ------
        int
            The rank of a spare that has not heard; again and again.
        """
        end = end._replace(text=end.text[:_MOST_LETTERS])
        send = self._world.issend if end.is_good else self._world.isend
        for rank in range(self.num_active, self.size):
            try:
                request = send((call, end), rank, _TAG_OF_END)
                while not request.Test():
                    yield rank
            except self._mpi.Exception as error:
                if not is_loss(self._mpi, error):
                    raise
                if error.Get_error_class() != self._mpi.ERR_REVOKED:
                    self.lost_spares.add(self.members[rank])

    def abort(self, status: int) -> None:
        """Ends the processes of all ranks with this exit status."""
        abort_job(self._mpi, status)

    @property
    def may_be_needed(self) -> bool:
        """Whether others may wait for this rank when its program ends."""
        return self.first_size > 1 and (self.is_fault_tolerant or self._num_spares > 0)

    def say_farewell(self, cause: str) -> None:
        """Notes why the program ends, and tells the spares."""
        if self._farewell is None:
            self._farewell = cause
        if self.transport is not None:
            for _ in self.dismiss(math.inf, Dismissal(cause or NO_FURTHER_CALL)):
                sleep(_LOOK_SECONDS)


def _farewell_error(everyone: Sequence[_Introduction], rank: int) -> RankLostError | None:
    """Returns the error of ranks that are needed, where the program has ended on others.

    `rank` is that of this one in the world that they leave.
    """
    ended = [one for one in everyone if one.farewell is not None]
    if not ended:
        return None
    failed = [one for one in ended if one.farewell]
    ranks = compressed(sorted(one.member.first_rank for one in ended))
    causes = [f"rank {one.member.first_rank} ended with {one.farewell}" for one in failed]
    error = RankLostError(
        f"the program has ended on rank{'s' * (len(ended) > 1)} {ranks}: the others can't go on"
        " alone after a loss."
        f" {'; '.join(causes) or 'All ranks must come to the end of run_elastic'}."
    )
    stay = [one for one in everyone if one.farewell is None]
    mark_reporter(error, [*failed, *stay, *ended][0].rank == rank)
    return error
