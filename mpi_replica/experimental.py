"""The names that tf users look for under ``tf.distribute.experimental``."""

from .data import ValueContext
from .options import CommunicationImplementation, CommunicationOptions

__all__ = ["CommunicationImplementation", "CommunicationOptions", "ValueContext"]
