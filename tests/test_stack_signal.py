"""SIGUSR2: taken where it is free, left to whoever has it, and given back (issue 3).

Each test is a program in a process of its own: a process has one handler for a signal.
"""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from launching import ROOT

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="there is no SIGUSR2 here")

# The module alone: the package, with numpy, would take most of the time.
HEAD = """
    import faulthandler, os, runpy, signal, sys, threading
    StackSignal = runpy.run_path("mpi_replica/ranks/watch/stack_signal.py")["StackSignal"]

    def send(number=signal.SIGUSR2):
        os.kill(os.getpid(), number)

    taker = StackSignal()
"""


def run(program):
    """Run a program; return what it wrote to stdout and to stderr, when it ended well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HEAD) + textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.split(), done.stderr


def test_a_free_signal_is_taken_and_told_once_each_time():
    told, errors = run(
        """
        taker.install()
        print(taker.take())
        for _ in range(2):
            send()
            print(taker.take(), taker.take())
        """
    )
    assert told == ["False", *["True", "False"] * 2]
    assert errors == ""


def test_it_is_told_while_the_main_thread_is_in_c_code_that_does_not_come_back():
    """As inside MPI: Python's handler runs later, and that is no second signal."""
    told, _ = run(
        """
        import ctypes
        libc = ctypes.CDLL(None)  # its calls let other threads run
        mutex = ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        taker.install()

        def watch():
            send()
            while not taker.take():
                pass
            print("told")
            libc.pthread_mutex_unlock(mutex)

        watcher = threading.Thread(target=watch)
        watcher.start()
        libc.pthread_mutex_lock(mutex)
        watcher.join()
        print(taker.take(), taker.take())
        send()
        print(taker.take(), taker.take())
        """
    )
    assert told == ["told", "False", "False", "True", "False"]


def test_other_signals_are_not_taken_for_it():
    told, _ = run(
        """
        taker.install()
        signal.signal(signal.SIGUSR1, lambda *_: print("other"))
        send(signal.SIGUSR1)
        print(taker.take())
        """
    )
    assert told == ["other", "False"]


def test_a_program_that_uses_the_signal_keeps_it():
    told, _ = run(
        """
        signal.signal(signal.SIGUSR2, lambda *_: print("mine"))
        taker.install()
        send()
        print(taker.take())
        taker.remove()
        send()
        """
    )
    assert told == ["mine", "False", "mine"]


def test_a_signal_that_is_ignored_stays_so():
    told, _ = run(
        """
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        taker.install()
        send()
        print(taker.take())
        """
    )
    assert told == ["False"]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the system does not tell")
def test_faulthandler_keeps_the_signal():
    """C code's handler, of which Python's signal module does not know."""
    told, errors = run(
        """
        faulthandler.register(signal.SIGUSR2)
        taker.install()
        send()
        print(taker.take())
        """
    )
    assert told == ["False"]
    assert "most recent call first" in errors


def test_a_program_that_takes_the_signal_later_has_it_for_itself():
    told, _ = run(
        """
        taker.install()
        signal.signal(signal.SIGUSR2, lambda *_: print("mine"))
        send()
        print(taker.take())
        taker.remove()
        send()
        """
    )
    assert told == ["mine", "False", "mine"]


def test_the_signal_is_given_back():
    told, _ = run(
        """
        for _ in range(3):
            taker.install()
            send()
            print(taker.take())
            taker.remove()
            print(signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL, signal.set_wakeup_fd(-1))
        """
    )
    assert told == ["True", "True", "-1"] * 3


def test_an_event_loop_keeps_its_wakeup_file():
    told, _ = run(
        """
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        taker.install()
        send()
        print(taker.take())
        taker.remove()
        print(signal.set_wakeup_fd(-1) == write)
        """
    )
    assert told == ["True", "True"]


def test_a_thread_can_not_take_it():
    """Python lets only the main thread set handlers."""
    told, _ = run(
        """
        thread = threading.Thread(target=lambda: (taker.install(), taker.remove()))
        thread.start()
        thread.join()
        print(signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL, taker.take())
        """
    )
    assert told == ["True", "False"]
