"""The frames of all threads, as the watcher looks at them many times a second."""

import gc
import sys
import threading

import pytest

from mpi_replica.core.thread_frames import current_frames


@pytest.fixture
def threads():
    """Many threads that wait: so many frames that Python collects garbage among them."""
    is_over = threading.Event()
    waiting = [threading.Thread(target=is_over.wait) for _ in range(50)]
    for thread in waiting:
        thread.start()
    yield waiting
    is_over.set()
    for thread in waiting:
        thread.join()


def test_each_thread_has_its_frame(threads):
    frames = current_frames()
    assert {thread.ident for thread in threads} <= frames.keys()
    assert {frames[thread.ident].f_code.co_name for thread in threads} == {"wait"}


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="garbage is collected behind the call there"
)
def test_no_garbage_is_collected_while_they_are_listed(threads):
    """A callback, or a finalizer, that gave way to a thread that begins would wait for it."""
    begun = []
    before = gc.get_threshold()
    gc.callbacks.append(lambda phase, info: begun.append(phase))
    try:
        gc.set_threshold(1)
        begun.clear()
        sys._current_frames()
        while_listed = len(begun)
        begun.clear()
        current_frames()
        by_us = len(begun)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
    assert while_listed > 0
    assert by_us == 0
    assert gc.isenabled()
