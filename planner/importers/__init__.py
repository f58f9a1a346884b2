"""Other frameworks' configs read as strategies: what was understood, what was not, what had to be assumed."""

from planner.importers.read import read_config

__all__ = ["read_config"]
