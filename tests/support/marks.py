"""Which of a test's cases run always, and which with ``-m slow``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pytest
from hypothesis import settings

Case = TypeVar("Case")


def slow_but(
    names: str,
    values: Iterable[Any],
    is_quick: Callable[[Any], bool],
    is_long: Callable[[Any], bool] = lambda _: False,
    **options: Any,
) -> pytest.MarkDecorator:
    """``parametrize``, with all values but the quick ones marked slow, and of these the long ones long, too."""
    several = "," in names

    def marks(value: Any) -> list[pytest.MarkDecorator]:
        if is_quick(value):
            return []
        return [pytest.mark.slow, pytest.mark.long] if is_long(value) else [pytest.mark.slow]

    found = [pytest.param(*(value if several else (value,)), marks=marks(value)) for value in values]
    return pytest.mark.parametrize(names, found, **options)


def some_of(examples: int) -> int:
    """How many of so many examples are drawn: half, but all where they are to be others than usual."""
    return examples if settings.get_current_profile_name() == "random" else examples // 2


def always(value: object) -> bool:
    """Of every case."""
    return True


def asked_for(request: pytest.FixtureRequest, cases: Mapping[str, Case]) -> dict[str, Case]:
    """Of a module's cases those by whose ``name`` some test that was collected is parametrized."""
    names = {
        item.callspec.params.get("name")
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item, "callspec")
    }
    return {name: case for name, case in cases.items() if name in names}
