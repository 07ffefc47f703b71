"""Whether an error is of the call in which it came up, or of a signal's handler."""

from __future__ import annotations

__all__ = ["is_of_signal_handler"]


def is_of_signal_handler(error: BaseException, caller: str) -> bool:
    """Return whether a signal's handler has raised `error` during a call of MPI.

    Parameters
    ----------
    error : BaseException
        With its traceback.
    caller : str
        The file of the code that called MPI.
    """
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    file = "" if step is None else step.tb_frame.f_code.co_filename
    return file != caller and not file.endswith((".pyx", ".pxi"))  # mpi4py's own frames
