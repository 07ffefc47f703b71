"""The names that tf users look for under ``tf.distribute.experimental``."""

from .core.options import CommunicationImplementation, CommunicationOptions
from .data import ValueContext

__all__ = ["CommunicationImplementation", "CommunicationOptions", "ValueContext"]
