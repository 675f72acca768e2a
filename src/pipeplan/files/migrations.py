"""Versions of the file formats: the one place that says which there are, and what leads from each to the next.

A kind of file is at version 1 plus the number of its migrations. A migration is a pure function from the file's
content at version n to its content at version n + 1. The content it gets has the form of version n
(:mod:`pipeplan.files.forms`): every key is there, with its default where the file left it out, and every value has
its JSON type. It need not keep ``schema_version``. A placement inside a profile is part of the profile, so a new
version of placements is a new version of profiles too, whose migration takes the placement along.

To add a version: change the model, add the migration below, run ``python -m pipeplan.files.schema docs/schema``.
Renaming a key of a profile's blocks and adding one without a default would be::

    def _blocks_have_a_family(profile: Content) -> Content:
        blocks = [{"family": block["operator"], "layer": 0, ...} for block in profile["blocks"]]
        return profile | {"blocks": blocks}

    MIGRATIONS = {("profile", 1): _blocks_have_a_family}

A key that is new and has a default needs a migration that changes nothing: the version says which keys a fingerprint
is taken of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["MIGRATIONS", "Content", "Migration", "current_version"]

Content = dict[str, Any]
"""A file as JSON has it: dictionaries, lists, texts, numbers, booleans and None."""

Migration = Callable[[Content], Content]

MIGRATIONS: dict[tuple[str, int], Migration] = {}
"""What leads from version n of a kind of file to n + 1, by kind and n."""


def current_version(kind: str) -> int:
    """The version that files of a kind are written in; all from 1 to this one are read."""
    version = 1
    while (kind, version) in MIGRATIONS:
        version += 1
    return version
