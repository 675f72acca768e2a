"""Which of a test's cases run always, and which with ``-m slow``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pytest
from hypothesis import settings

Case = TypeVar("Case")


def slow_but(
    names: str,
    values: Iterable[Any],
    is_quick: Callable[[Any], bool],
    is_long: Callable[[Any], bool] | None = None,
    **options: Any,
) -> pytest.MarkDecorator:
    """``parametrize``, with all values but the quick ones marked slow, and of these the long ones long, too.

    Where nothing says which are long, two in three are.
    """
    several, number = "," in names, itertools.count()

    def marks(value: Any) -> list[pytest.MarkDecorator]:
        if is_quick(value):
            return []
        long = next(number) % 3 != 0 if is_long is None else is_long(value)
        return [pytest.mark.slow, pytest.mark.long] if long else [pytest.mark.slow]

    found = [pytest.param(*(value if several else (value,)), marks=marks(value)) for value in values]
    return pytest.mark.parametrize(names, found, **options)


def one_in(count: int, names: str, values: Iterable[Any], first: int = 0, **options: Any) -> pytest.MarkDecorator:
    """``parametrize``, of whose values that have no marks one in so many, from this one on, runs always.

    The others, which are like them, are long.
    """
    several, found, place = "," in names, list[Any](), 0
    for value in values:
        if hasattr(value, "marks") and hasattr(value, "values") and value.marks:
            found.append(value)
            continue
        case = value if hasattr(value, "marks") else pytest.param(*(value if several else (value,)))
        is_kept = place >= first and (place - first) % count == 0
        found.append(
            case if is_kept else pytest.param(*case.values, id=case.id, marks=[pytest.mark.slow, pytest.mark.long])
        )
        place += 1
    return pytest.mark.parametrize(names, found, **options)


def some_of(examples: int) -> int:
    """How many of so many examples are drawn: a quarter, but all where they are to be others than usual."""
    return examples if settings.get_current_profile_name() == "random" else max(min(examples, 3), examples // 4)


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
