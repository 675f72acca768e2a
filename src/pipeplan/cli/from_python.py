"""Arguments of Python's functions as the parameters of the verb that does the same: one parser for both.

What a flag may say, its units, ranges and its default are said once, where the verb's options are. A value that is no
text is taken as it is where a file or a name is meant: a profile, a cluster, a placement, a model.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import click
from click.core import ParameterSource

from pipeplan.cli.main import VERBS
from pipeplan.cli.shared import KnownNames
from pipeplan.errors import UsageError, argument_named


def command_of(verb: str) -> click.Command:
    """The command of a verb."""
    command: click.Command = getattr(importlib.import_module(f"pipeplan.cli.{VERBS[verb][0]}"), f"{verb}_command")
    return command


def arguments_of(verb: str) -> Iterator[tuple[str, click.Parameter]]:
    """The verb's parameters, by the names of their arguments in Python: flags with underscores."""
    for parameter in command_of(verb).params:
        if isinstance(parameter, click.Option):
            flag = next(each for each in parameter.opts if each.startswith("--"))
            yield argument_named(flag[2:]), parameter
        else:
            yield str(parameter.metavar).strip("[].").lower(), parameter


def context_of(verb: str, given: Mapping[str, Any]) -> click.Context:
    """The verb's context, as if these arguments stood on the command line; None is what the option has without.

    Raises:
        UsageError: the verb's parser refuses one of them; the text has its name.
    """
    command = command_of(verb)
    needed = [parameter for parameter in command.params if parameter.required]
    words = [[*each.opts[:1], "-"] if isinstance(each, click.Option) else ["-"] for each in needed]
    context = command.make_context(verb, [word for each in words for word in each])
    for name, parameter in arguments_of(verb):
        value = given.get(name)
        assert parameter.name is not None
        if value is None or value is context.params[parameter.name]:
            continue
        try:
            context.params[parameter.name] = _parsed(parameter, value, context)
        except click.BadParameter as error:
            raise UsageError(f"{name}={value!r}: {error.message}") from None
        if not _is_default(parameter, context, context.params[parameter.name]):
            context.set_parameter_source(parameter.name, ParameterSource.COMMANDLINE)
    return context


def _is_default(parameter: click.Parameter, context: click.Context, value: Any) -> bool:
    default = parameter.get_default(context)
    return bool(value == (parameter.type_cast_value(context, default) if isinstance(default, str) else default))


def _parsed(parameter: click.Parameter, value: Any, context: click.Context) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(parameter.type, (click.Path, KnownNames)) and not isinstance(value, str):
        return tuple(map(str, value)) if getattr(parameter, "multiple", False) else value
    if isinstance(parameter.type, click.IntRange) and isinstance(value, float) and not value.is_integer():
        raise click.BadParameter(f"{value!r} is not a whole number")
    if getattr(parameter, "multiple", False) and isinstance(value, str):
        value = [value]
    return parameter.type_cast_value(context, value)
