"""Renamed flags: help shows the new spelling, and the old one means the same; aliases stand beside each other."""

import re

import pytest
from click import BadParameter, Context, Option
from click.types import FloatParamType

from pipeplan.cli.main import VERBS, cli
from pipeplan.cli.shared import BYTES, DURATION

RENAMED = [
    ("search", "--spread", "--shard-shared", "yes"),
    ("compare", "--spread", "--shard-shared", "no"),
    ("frontier", "--grain", "--split-level", "operator"),
    ("frontier", "--within", "--tolerance", "0.01"),
    ("profile", "--grain", "--granularity", "layer"),
    ("run", "--grain", "--granularity", "operator"),
]
ALIASES = [
    ("search", "--replicas", "--dp", "2"),
    ("search", "--mini-batch", "--global-batch-size", "8"),
    ("compare", "--mini-batch", "--global-batch-size", "8"),
    ("frontier", "--mini-batch", "--global-batch-size", "8"),
    ("search", "--chunks", "--vp", "3"),
    ("compare", "--chunks", "--virtual-stages", "3"),
    ("example", "--chunks", "--vp", "3"),
]


def context_of(verb: str, *arguments: str) -> Context:
    command = cli.get_command(Context(cli), verb)
    assert command is not None
    return command.make_context(verb, [*arguments])


@pytest.mark.parametrize(("verb", "one", "other", "value"), RENAMED + ALIASES)
def test_both_spellings_ask_for_the_same(verb: str, one: str, other: str, value: str) -> None:
    asked = [context_of(verb, "input", flag, value).params for flag in (one, other)]
    assert asked[0] == asked[1] != context_of(verb, "input").params


@pytest.mark.parametrize(("verb", "old", "new"), [case[:3] for case in RENAMED])
def test_help_shows_new_spellings_alone(verb: str, old: str, new: str) -> None:
    context = context_of(verb, "input")
    words = context.command.get_help(context).split()
    assert new in words
    assert old not in words


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "names", [("--replicas", "--dp"), ("--chunks", "--vp", "--virtual-stages"), ("--mini-batch", "--global-batch-size")]
)
def test_every_verb_that_has_a_flag_has_its_aliases(verb: str, names: tuple[str, ...]) -> None:
    command = cli.get_command(Context(cli), verb)
    assert command is not None
    for parameter in command.params:
        assert names[0] not in parameter.opts or set(names) <= {*parameter.opts}


@pytest.mark.parametrize(("verb", "one", "other"), [case[:3] for case in ALIASES])
def test_help_shows_aliases_side_by_side(verb: str, one: str, other: str) -> None:
    context = context_of(verb, "input")
    text = context.command.get_help(context)
    assert f"{one}," in text
    assert other in text


def quantities(verb: str) -> list[str]:
    """The flags of a verb that take a size or a duration."""
    command = cli.get_command(Context(cli), verb)
    assert command is not None
    return [each.opts[0] for each in command.params if each.type in (BYTES, DURATION)]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if quantities(verb)])
def test_the_error_of_a_number_without_unit_names_its_flag(verb: str) -> None:
    for flag in quantities(verb):
        with pytest.raises(BadParameter, match=r"^3 of what\? 3(GB|s), or 3 (bytes|milliseconds) as ") as error:
            context_of(verb, "input", flag, "3")
        assert f"Invalid value for '{flag}'" in error.value.format_message()


def test_sizes_and_durations_without_unit_are_refused_wherever_flags_take_them() -> None:
    found = {flag for verb in VERBS for flag in quantities(verb)}
    assert {"--memory", "--memory-reserve", "--time-limit", "--split-overhead"} <= found


def numbers() -> list[tuple[str, Option]]:
    """Every option of every verb that takes numbers."""
    commands = [(verb, cli.get_command(Context(cli), verb)) for verb in VERBS]
    return [
        (verb, each)
        for verb, command in commands
        for each in (command.params if command is not None else ())
        if isinstance(each, Option) and each.type.name in ("number", "numbers", "integer", "integer range")
    ]


@pytest.mark.parametrize(
    ("verb", "option"), [pytest.param(*each, id=f"{each[0]} {each[1].opts[0]}") for each in numbers()]
)
def test_numbers_out_of_all_bounds_are_refused_with_the_limit(verb: str, option: Option) -> None:
    for digits in (20, 4000, 10_000):
        with pytest.raises(BadParameter) as told:
            option.type.convert("9" * digits, option, None)
        limits = [int(number) for number in re.findall(r"\d+", told.value.message.replace("9" * digits, ""))]
        assert digits > 4300 or 0 < max(limits) <= 2**31


def test_there_are_numbers_to_look_at() -> None:
    found = {f"{verb} {name}" for verb, option in numbers() for name in option.opts}
    named = ["search --chunks", "search --microbatches", "search --slices", "search --zero-group", "search --max-span"]
    assert {*named, "frontier --devices", "run --steps", "example --devices", "profile --shards"} <= found
    assert len(found) > 60


def test_fractions_are_numbers() -> None:
    """``nan`` and, where they would mean nothing, infinite ones are refused."""
    for verb in VERBS:
        command = cli.get_command(Context(cli), verb)
        assert command is not None
        for each in command.params:
            if isinstance(each.type, FloatParamType):
                with pytest.raises(BadParameter):
                    each.type.convert("nan", each, None)
