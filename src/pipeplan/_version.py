"""The version, apart from what it is the version of."""

__version__ = "0.1.0"
