"""Names of a model's modules, as stages are told them: the plan's own, or by a template with N for a layer's number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.interop.layers import PlanLayers

Names = tuple[tuple[str, ...], ...]
"""Modules of a model's beginning, of its layer N, and of its end; the last are one entry or more."""


def read_names(template: Sequence[str]) -> Names:
    """Modules by what they are: ``["model.embed_tokens", "model.layers.N", "model.norm", "lm_head"]``.

    The one with a component ``N`` is a layer; what stands before it is the model's beginning.

    Raises:
        UsageError: there is no such template.
    """
    layers = [index for index, name in enumerate(template) if "N" in name.split(".")]
    if len(layers) != 1 or not all(re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name) for name in template):
        raise UsageError(
            f"--names {','.join(template)!r}: write modules with commas, one of them a layer with N for its number, as "
            "model.embed_tokens,model.layers.N,model.norm,lm_head"
        )
    at = layers[0]
    layer = r"\.".join(r"\d+" if part == "N" else part for part in template[at].split("."))
    for index, name in enumerate(template):
        if template.index(name) != index or re.fullmatch(layer, name):
            raise UsageError(f"--names {','.join(template)!r}: {name!r} is named twice; give every module once")
    return tuple(template[:at]), (template[at],), tuple(template[at + 1 :])


def numbered(template: str, layer: int) -> str:
    """A module's name with its layer's number."""
    return ".".join(str(layer) if part == "N" else part for part in template.split("."))


def names_by_template(layers: PlanLayers, names: Names) -> list[list[str]]:
    """[stage] its modules; what no block says is with the layer beside it."""
    beginning, (layer,), end = names
    found = [[numbered(layer, each.first + index) for index in range(each.count)] for each in layers.stages]
    found[0] = [*beginning, *found[0]]
    found[-1] += end
    return found


def own_names(plan: Plan) -> list[list[str]] | None:
    """[stage] the modules that the plan says of its blocks, outermost ones: None where it says none.

    A module stands for all that is in it where no other stage has any of that; lists of layers never do, because
    layers are what tools cut between.
    """
    if not plan.modules:
        return None
    users: dict[str, set[int]] = {}
    of_lists = set[str]()
    for number, stage in enumerate(plan.stages):
        for name in _of_blocks(plan, stage.blocks):
            for outer in _around(name):
                users.setdefault(outer, set()).add(number)
            parts = name.split(".")
            of_lists.update(".".join(parts[:at]) for at, part in enumerate(parts) if part.isdecimal())
    holders = {outer for each in of_lists for outer in _around(each)}
    found = []
    for stage in plan.stages:
        own = dict[str, None]()
        for name in _of_blocks(plan, stage.blocks):
            whole = (outer for outer in _around(name) if len(users[outer]) == 1 and outer not in holders)
            own[next(whole, name)] = None
        found.append(list(own))
    return found


def _of_blocks(plan: Plan, blocks: Sequence[str]) -> Iterator[str]:
    for block in blocks:
        yield from plan.modules.get(block, ())


def _around(name: str) -> Iterator[str]:
    """The modules around one, from the outside in, itself the last."""
    parts = name.split(".")
    return (".".join(parts[: length + 1]) for length in range(len(parts)))
