"""Signals that are held: handlers run later, once each, and are put back whatever they do."""

import signal
import threading

import pytest

from mpi_replica.ranks.held_signals import HeldSignals
from mpi_replica.ranks.watch.stack_signal import StackSignal

FIRST, SECOND = signal.SIGUSR1, signal.SIGTERM


class AskedError(Exception):
    pass


@pytest.fixture
def came():
    """The signals whose handlers have run; the second one's raises."""
    numbers = []

    def note(number, frame):
        numbers.append(number)

    def fail(number, frame):
        numbers.append(number)
        raise AskedError

    before = [signal.signal(FIRST, note), signal.signal(SECOND, fail)]
    yield numbers
    for number, handler in zip((FIRST, SECOND), before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def held():
    signals = HeldSignals()
    signals.hold()
    yield signals
    signals.release()


def test_what_comes_waits_for_the_release_and_comes_in_its_order(came):
    handlers = signal.getsignal(FIRST), signal.getsignal(SECOND)
    signals = HeldSignals()
    signals.hold()
    for number in (FIRST, SECOND, FIRST):
        signal.raise_signal(number)
    assert came == []
    with pytest.raises(AskedError):
        signals.release()
    assert came == [FIRST, SECOND, FIRST]
    assert (signal.getsignal(FIRST), signal.getsignal(SECOND)) == handlers


@pytest.mark.parametrize("place", ["hold", "release"])
def test_what_a_handler_raises_in_between_comes_when_all_are_held_or_put_back(
    came, monkeypatch, place
):
    handlers = signal.getsignal(FIRST), signal.getsignal(SECOND)
    getsignal = signal.getsignal

    def interrupted(number):
        if number == SECOND:
            monkeypatch.setattr(signal, "getsignal", getsignal)
            signal.raise_signal(SECOND)
        return getsignal(number)

    signals = HeldSignals()
    for step in ("hold", "release"):
        if step == place:
            monkeypatch.setattr(signal, "getsignal", interrupted)
        if step == "hold":
            signals.hold()
            assert getsignal(FIRST) not in handlers
            assert getsignal(SECOND) not in handlers
        else:
            with pytest.raises(AskedError):
                signals.release()
    assert came == [SECOND]
    assert (getsignal(FIRST), getsignal(SECOND)) == handlers


def test_what_is_let_through_comes_once_and_later_ones_are_held_again(came, held):
    signal.raise_signal(SECOND)
    with pytest.raises(AskedError):
        held.let_through()
    held.let_through()
    signal.raise_signal(FIRST)
    assert came == [SECOND]
    held.let_through()
    assert came == [SECOND, FIRST]


def test_a_handler_that_a_handler_sets_stays(came):
    signal.signal(FIRST, lambda number, frame: signal.signal(FIRST, signal.SIG_IGN))
    signals = HeldSignals()
    signals.hold()
    signal.raise_signal(FIRST)
    signals.let_through()
    signals.release()
    assert signal.getsignal(FIRST) is signal.SIG_IGN


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_function_stays_as_it_is(came, held, ignored):
    held.release()
    signal.signal(FIRST, ignored)
    held.hold()
    assert signal.getsignal(FIRST) is ignored


def test_in_another_thread_nothing_is_held(came):
    signals = HeldSignals()
    handler = signal.getsignal(FIRST)
    thread = threading.Thread(target=signals.hold)
    thread.start()
    thread.join()
    assert signal.getsignal(FIRST) is handler


def test_the_handler_of_the_stack_signal_may_be_given_back_meanwhile(held):
    held.release()
    before = signal.getsignal(signal.SIGUSR2)
    stack_signal = StackSignal()
    stack_signal.install()
    assert signal.getsignal(signal.SIGUSR2) != before
    held.hold()
    stack_signal.remove()
    held.release()
    assert signal.getsignal(signal.SIGUSR2) == before
