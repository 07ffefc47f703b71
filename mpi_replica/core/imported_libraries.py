"""The array libraries that the program has imported."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

# A class that each has: a folder of that name, beside the program say, is a module, too.
_CLASSES = {"torch": "Tensor", "jax": "Array", "cupy": "ndarray"}

_known: dict[str, Any] = {}


def imported_library(name: str) -> Any:
    """Returns torch, jax or cupy; None where the program has not imported it, or not to its end.

    While another thread imports it, names are missing: nobody can have an array of it then.
    """
    module = sys.modules.get(name)
    if module is _known.get(name):  # nearly always, also where both are None
        return module
    is_incomplete = getattr(getattr(module, "__spec__", None), "_initializing", False)
    if is_incomplete or not hasattr(module, _CLASSES[name]):
        return None
    _known[name] = module
    return module


def is_made_by_dynamo(code: CodeType) -> bool:
    """Returns whether torch.compile has made this code of a function, or of the rest of one."""
    made = getattr(sys.modules.get("torch._dynamo.utils"), "orig_code_map", ())
    return code in made or code.co_name.startswith("torch_dynamo_resume_in_")
