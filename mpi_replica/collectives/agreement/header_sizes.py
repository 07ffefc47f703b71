"""How large headers are, so that what a call sends travels with them.

After a call the same one follows that followed it the last time: programs are loops. So all ranks
foresee alike how large the next header should be, by nothing but the calls on which all of them
have agreed. Two ranks in exchanges of different sizes would wait for ever: whatever else a header
tells, all ranks begin anew with the smallest size after it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ranks.transport import Bytes
from .header import PAYLOAD_START, payloads

# A program that makes new calls all the time must not grow.
_MOST_CALLS = 4096


class HeaderSizes:
    """The size of the next header, and the headers of the last agreement.

    Parameters
    ----------
    memory : dict
        Where the headers of all ranks lie after an exchange, by the bytes of each.
    carries_payload : bool
        Whether payloads travel with them at no extra cost. Otherwise they are as small as can be,
        and have a message of their own.

    Attributes
    ----------
    next_bytes : int
        Of each header of the next exchange.
    room_bytes : int
        The most bytes of a payload in it.
    most_room_bytes : int
        The same of the largest header that there may be.
    heads : callable
        Returns what the headers begin with that have come by the next exchange.
    head_starts : range
        Where the one of each rank begins there.
    received_bytes : int
        Of each header of the last agreement.
    """

    def __init__(self, memory: Mapping[int, Bytes], *, carries_payload: bool = True) -> None:
        self.memory = memory
        self._least, *larger = sorted(memory)
        self._larger = larger if carries_payload else []
        self.carries_payload = carries_payload
        self.most_room_bytes = max([self._least, *self._larger]) - PAYLOAD_START
        # Of large ones no more is looked at than must be.
        least = memory[self._least]
        self._heads = {self._least: (least.tobytes, range(0, least.size, self._least))}
        for size_bytes in larger:
            heads = memory[size_bytes].reshape(-1, size_bytes)[:, :PAYLOAD_START]
            self._heads[size_bytes] = heads.tobytes, range(0, heads.size, PAYLOAD_START)
        #: What was foreseen to follow each call; only sizes that are not the least.
        self._after: dict[int, int] = {}
        self.received_bytes = self._least
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets everything: the headers did not tell that all ranks agree."""
        self._after.clear()
        self._call = self._call_before = 0
        self._set(self._least)

    def _set(self, size_bytes: int) -> None:
        self.next_bytes = size_bytes
        self.room_bytes = size_bytes - PAYLOAD_START
        self.heads, self.head_starts = self._heads[size_bytes]

    def agree(self, call: int) -> None:
        """Takes the fingerprint of the call on which all ranks have agreed."""
        size_bytes = self.received_bytes = self.next_bytes
        last = self._call_before = self._call
        self._call = call
        if self._after:
            if size_bytes != self._least:
                self._after.pop(last, None)  # unless the call says again that it needs it
            foreseen = self._after.get(call, self._least)
            if foreseen != size_bytes:
                self._set(foreseen)

    def agree_again(self) -> None:
        """Takes that all ranks have agreed once more on the last call."""
        self.agree(self._call + 1)

    def size_of(self, payload_bytes: float) -> int:
        """Returns the bytes of the least header that holds so much; the least one if none does."""
        needed = payload_bytes + PAYLOAD_START
        if needed > self._least:
            for size_bytes in self._larger:
                if size_bytes >= needed:
                    return size_bytes
        return self._least

    def learn(self, size_bytes: int) -> None:
        """Takes how large the header of the call that was agreed on should have been.

        Behind the agreement, and the same on all ranks: what `size_of` gives for the rank that has
        most to send.
        """
        if size_bytes == self._least:
            return
        if len(self._after) >= _MOST_CALLS:
            self._after.clear()
        self._after[self._call_before] = size_bytes
        if self._call == self._call_before:
            self._set(size_bytes)

    @property
    def are_larger(self) -> bool:
        """Whether headers were larger than usual, for what must be learned again."""
        return self.received_bytes != self._least

    def payloads(self) -> list[bytes]:
        """Returns what each rank gave to the last agreement, where there was a payload."""
        return payloads(self.memory[self.received_bytes].tobytes(), self.received_bytes)
