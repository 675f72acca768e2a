"""What training keeps of parameters: the one place where counts and a recipe become bytes.

A recipe is data of the catalog: what one parameter takes of every kind of memory. A profile names one and counts
parameters; with the recipe ``custom`` its blocks state bytes instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter

from pipeplan.catalog import names, read_table, require_known
from pipeplan.errors import UsageError, choose_from, unknown_key
from pipeplan.files import Block, Profile, TiedParameter, sha256_of
from pipeplan.files.recipe import ADAMW, GradientDtype, Recipe
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, STATE_KINDS, MemoryBytes, MemoryKind

RECIPES = names("recipes")
"""Every recipe of training by name."""

INFERENCE_RECIPES = names("inference_recipes")
"""Every recipe of inference, by which nothing is kept but parameters."""

OPTIMIZERS = (ADAMW, "momentum", "sgd")
"""Optimizers whose state every recipe knows."""

_FROZEN, _WORKSPACE = "frozen", "workspace"
_FORMATS: dict[str, tuple[GradientDtype, int]] = {
    "float32": ("fp32", 4),
    "bfloat16": ("bf16", 2),
    "float16": ("fp16", 2),
}
"""By the name of a number format: how flags call it, and bytes."""


@dataclass(frozen=True, slots=True)
class StateRecipe:
    """What training keeps for every parameter, in bytes by the names of kinds of memory.

    ``dtype`` is the number format that blocks compute in, ``products`` that of matrix products where it is another.
    Whatever asks for it by name has gradients add up in what it ``accumulates`` in, where that is another than that of
    a file which names it alone. Of
    ``bytes`` those of ``frozen`` are for parameters that are not trained, by default as many as the copy that computes
    has, and ``workspace`` is of a copy that is there only while a block runs. ``optimizer`` has the bytes of its state
    by the optimizer's name.
    """

    title: str
    source: str
    dtype: str
    bytes: Mapping[str, int]
    optimizer: Mapping[str, int]
    products: str = ""
    accumulates: GradientDtype | None = None

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        kinds = [kind.name for kind in STATE_KINDS if kind is not OPTIMIZER]
        unknown = unknown_key(self.bytes, [*kinds, _FROZEN, _WORKSPACE]) or unknown_key(self.optimizer, OPTIMIZERS)
        if unknown is not None or self.dtype not in _FORMATS or len(self.optimizer) < len(OPTIMIZERS):
            raise ValueError(f"recipe {self.title!r}: {unknown or f'no dtype of {list(_FORMATS)}, or an optimizer'}")

    @property
    def gradient_dtypes(self) -> tuple[GradientDtype, ...]:
        """Formats that gradients may add up in: float32, and the one that computes."""
        return tuple(dict.fromkeys(("fp32", _FORMATS[self.dtype][0])))


@cache
def state_recipe(name: str) -> StateRecipe:
    """The recipe of this name.

    Raises:
        UsageError: there is none.
    """
    folder = "inference_recipes" if name in INFERENCE_RECIPES else "recipes"
    if name not in names(folder):
        raise UsageError(f"there is no recipe {name!r}; {choose_from(name, RECIPES)}")
    table = read_table(folder, name)
    require_known(table, StateRecipe, f"{name}.toml")
    return TypeAdapter(StateRecipe).validate_python(table)


class _PerParameter(NamedTuple):
    """Bytes of one parameter: of a trained and of a frozen one, and of the copy that is there while a block runs."""

    trained: MemoryBytes
    frozen: MemoryBytes
    running: int


@cache
def _per_parameter(recipe: Recipe) -> _PerParameter:
    """Raises UsageError where the catalog has no such recipe."""
    of_catalog = state_recipe(recipe.name)
    if recipe.optimizer not in of_catalog.optimizer:
        raise UsageError(
            f"recipe {recipe.name} has no optimizer {recipe.optimizer!r}; {choose_from(recipe.optimizer, OPTIMIZERS)}"
        )
    sizes = {kind: of_catalog.bytes.get(kind.name, 0) for kind in STATE_KINDS}
    sizes[OPTIMIZER] = of_catalog.optimizer[recipe.optimizer]
    if recipe.gradient_dtype is not None:
        sizes[GRADIENTS] = _gradient_bytes(recipe)
    frozen = of_catalog.bytes.get(_FROZEN, sizes[PARAMETERS])
    return _PerParameter(MemoryBytes(sizes), MemoryBytes({PARAMETERS: frozen}), of_catalog.bytes.get(_WORKSPACE, 0))


def _gradient_bytes(recipe: Recipe) -> int:
    usable = state_recipe(recipe.name).gradient_dtypes
    if recipe.gradient_dtype not in usable:
        raise UsageError(
            f"recipe {recipe.name} has gradients in {' or '.join(usable)}, not in {recipe.gradient_dtype}; choose one "
            "of these with --gradient-dtype"
        )
    return next(size for name, size in _FORMATS.values() if name == recipe.gradient_dtype)


def bytes_per_parameter(recipe: Recipe) -> MemoryBytes:
    """What training keeps of one trained parameter, by a recipe of the catalog. Raises UsageError if there is none."""
    return _per_parameter(recipe).trained


def copy_held(recipe: Recipe) -> MemoryKind:
    """What is kept of parameters: the copy that computes, or the master copy where that is cast at each use."""
    return MASTER if not recipe.is_custom and _per_parameter(recipe).running else PARAMETERS


def step_bytes(state: MemoryBytes, recipe: Recipe) -> int:
    """Bytes that the optimizer's step moves where a device keeps this state: of as many parameters as it has that of.

    It reads gradients, and the optimizer's state and the parameters that it changes, which it writes, too; where it
    changes a master copy it also writes the copy that computes. Frozen parameters, of which there is only the latter,
    it leaves alone; with the recipe ``custom`` it is not known which these are, and all are taken to be trained.
    """
    if recipe.is_custom:
        return _moved(state)
    each = bytes_per_parameter(recipe)
    divided = next((kind for kind in (OPTIMIZER, MASTER, GRADIENTS) if each[kind]), GRADIENTS)
    return state[divided] * _moved(each) // each[divided] if each[divided] else 0  # of inference nothing steps


def step_ns(state: MemoryBytes, recipe: Recipe, bytes_per_s: int | None) -> int:
    """Ns of the optimizer's step of what a device keeps, as :func:`step_bytes`; 0 where no rate is known."""
    return 0 if bytes_per_s is None else -(-(10**9 * step_bytes(state, recipe)) // bytes_per_s)


def _moved(state: MemoryBytes) -> int:
    copies = state[PARAMETERS] + 2 * state[MASTER] if state[MASTER] else 2 * state[PARAMETERS]
    return state[GRADIENTS] + 2 * state[OPTIMIZER] + copies


def state_of(part: Block | TiedParameter, recipe: Recipe) -> MemoryBytes:
    """What training keeps of a part of a profile, unsplit, by the profile's recipe.

    Raises:
        UsageError: the catalog has no such recipe.
    """
    if recipe.is_custom:
        stated = {kind: getattr(part, kind.key) for kind in STATE_KINDS}
        if stated[GRADIENTS] is None:
            stated[GRADIENTS] = stated[PARAMETERS]
        return MemoryBytes(stated)
    each = _per_parameter(recipe)
    return each.trained * part.parameters + each.frozen * part.frozen_parameters


def whole_state_of(block: Block, recipe: Recipe) -> MemoryBytes:
    """The part of a block's :func:`state_of` that each of the shards which split it keeps whole. Raises as that does.

    With the recipe ``custom`` bytes are in proportion to parameters: of gradients, master copies and the optimizer to
    those that are trained.
    """
    trained, frozen = block.whole_parameters, block.whole_frozen_parameters
    if not trained + frozen:
        return MemoryBytes()
    if not recipe.is_custom:
        each = _per_parameter(recipe)
        return each.trained * trained + each.frozen * frozen
    both = trained + frozen, block.parameters + block.frozen_parameters
    return MemoryBytes(
        (kind, size * part // max(1, total))
        for kind, size in state_of(block, recipe).items()
        for part, total in (both if kind is PARAMETERS else (trained, block.parameters),)
    )


def state_over(block: Block, recipe: Recipe, shards: int) -> MemoryBytes:
    """What so many shards keep of a block together, each an equal part of it. Raises as :func:`state_of`."""
    return state_of(block, recipe) + whole_state_of(block, recipe) * (shards - 1)


def state_table(parts: Sequence[Block], recipe: Recipe) -> NDArray[np.int64]:
    """[part, kind of state] bytes of many, as :func:`state_of`. Raises as that does."""
    if recipe.is_custom:
        columns = {kind: list(map(attrgetter(kind.key), parts)) for kind in STATE_KINDS}
        both = zip(columns[GRADIENTS], columns[PARAMETERS], strict=True)
        columns[GRADIENTS] = [own if stated is None else stated for stated, own in both]
        return np.array([columns[kind] for kind in STATE_KINDS], dtype=np.int64).T
    each = _per_parameter(recipe)
    counts = np.array(
        [list(map(attrgetter(key), parts)) for key in ("parameters", "frozen_parameters")], dtype=np.int64
    )
    of_one = np.array([[state[kind] for kind in STATE_KINDS] for state in (each.trained, each.frozen)], dtype=np.int64)
    found: NDArray[np.int64] = counts.T @ of_one
    return found


def states_of(profile: Profile) -> dict[str, MemoryBytes]:
    """{block: what training keeps of it}, as :func:`state_of`; one object of blocks that are alike."""

    def made() -> dict[str, MemoryBytes]:
        kinds = profile.kinds
        table = state_table(kinds, profile.recipe).tolist()
        firsts = {block.id: MemoryBytes.of_state(state) for block, state in zip(kinds, table, strict=True)}
        return {id_: firsts[first] for id_, first in profile.alike.items()}

    return profile.once("states", made)


def expert_state_of(block: Block, recipe: Recipe) -> MemoryBytes:
    """The experts' share of a block's :func:`state_of`, in proportion to their parameters. Raises as that does."""
    total = block.parameters + block.frozen_parameters
    return state_of(block, recipe) * block.expert_parameters // max(1, total)


def computing_dtype(recipe: Recipe) -> str | None:
    """The number format that blocks compute in; None where the recipe does not say it."""
    return None if recipe.is_custom else state_recipe(recipe.name).dtype


def products_in_fp8(recipe: Recipe) -> bool:
    """Whether products with weights compute in FP8."""
    return not recipe.is_custom and state_recipe(recipe.name).products == "float8"


def unnamed_bytes(width: int | None, trained: int, frozen: int = 0) -> dict[str, Any]:
    """What a block states of parameters in a format that no recipe has: AdamW's state in the format, as torch's is.

    ``width`` is bytes per number; nothing is stated without it.
    """
    if width is None:
        return {}
    kept = {PARAMETERS: width * (trained + frozen), GRADIENTS: width * trained, OPTIMIZER: 2 * width * trained}
    return MemoryBytes(kept).keyed(STATE_KINDS)


MEASURED = {"float32": "fp32", "bfloat16": "bf16"}
"""By number format the recipe of a plain torch loop, which is what is measured."""

ESTIMATED = {"float32": "fp32", "bfloat16": "bf16-mixed", "float16": "fp16-mixed"}
"""By number format the recipe that training usually has."""


def profiled_recipe(
    usual: Mapping[str, str],
    default_dtype: str,
    dtype: str | None = None,
    precision: str | None = None,
    gradient_dtype: GradientDtype | None = None,
    optimizer: str | None = None,
) -> tuple[str, Recipe]:
    """The number format that a new profile is of, and its recipe, by the flags; ``usual`` recipes by format.

    Raises:
        UsageError: the flags contradict each other, or the catalog does not have them.
    """
    if precision is not None:
        own = state_recipe(precision).dtype
        if dtype not in (None, own):
            raise UsageError(f"--precision {precision} computes in {own}; leave --dtype {dtype} out")
        return own, checked_recipe(precision, gradient_dtype, optimizer)
    dtype = dtype or default_dtype
    if dtype in usual:
        return dtype, checked_recipe(usual[dtype], gradient_dtype, optimizer)
    if gradient_dtype is not None or optimizer is not None:
        flag = f"--gradient-dtype {gradient_dtype}" if gradient_dtype else f"--optimizer {optimizer}"
        raise UsageError(f"{flag} changes a recipe, and there is none for {dtype}; give --precision, too")
    return dtype, Recipe()


def inference_recipe(dtype: str) -> Recipe:
    """The recipe of inference in a number format; ``custom`` where the catalog has none."""
    found = next((name for name in INFERENCE_RECIPES if state_recipe(name).dtype == dtype), None)
    return Recipe() if found is None else Recipe(name=found)


def measurable(recipe: Recipe) -> Recipe:
    """A recipe that measured blocks may have, whose parameters are in the format that computes.

    Raises:
        UsageError: they would be cast at each use, or products be in FP8, which takes times that are not measured.
    """
    if recipe.is_custom or (_per_parameter(recipe).running == 0 and not products_in_fp8(recipe)):
        return recipe
    raise UsageError(
        f"--precision {recipe.name}: blocks are measured with parameters in the format that computes, neither cast at "
        f"each use nor in FP8; measure with --precision bf16-mixed, and give --precision {recipe.name} to the search"
    )


def running_bytes(block: Block, recipe: Recipe, shards: int = 1) -> int:
    """Bytes of the copies of a block's parameters on so many shards that exist only while it runs.

    Raises as :func:`state_of`.
    """
    again = (shards - 1) * (block.whole_parameters + block.whole_frozen_parameters)
    return running_per_parameter(recipe) * (block.parameters + block.frozen_parameters + again)


def running_per_parameter(recipe: Recipe) -> int:
    """Bytes of one parameter of :func:`running_bytes`. Raises as :func:`state_of`."""
    return 0 if recipe.is_custom else _per_parameter(recipe).running


def optimizer_bytes(recipe: Recipe) -> int:
    """Bytes of the optimizer's state for one parameter. Raises as :func:`state_of`."""
    return _per_parameter(recipe).trained[OPTIMIZER]


def checked_recipe(name: str, gradient_dtype: GradientDtype | None = None, optimizer: str | None = None) -> Recipe:
    """A recipe of the catalog with what is chosen of it; gradients add up as is usual for it where nothing is chosen.

    Raises:
        UsageError: there is none of that name, or it has no such gradients or optimizer.
    """
    usual = state_recipe(name).accumulates  # a name that is none, of whatever letters, is refused as such
    found = Recipe(name=name, gradient_dtype=gradient_dtype or usual, optimizer=optimizer or ADAMW)
    plain = Recipe(name=name, optimizer=found.optimizer)
    if _per_parameter(found) == _per_parameter(plain):
        return plain  # the gradients are those it has anyway
    return found


def recipe_asked(
    profile: Profile,
    precision: str | None = None,
    gradient_dtype: GradientDtype | None = None,
    optimizer: str | None = None,
) -> Recipe:
    """The profile's recipe with what a request changes of it; None is left as it is.

    Raises:
        UsageError: there is no such recipe, or the profile cannot have it.
    """
    own = profile.recipe
    if precision is None and gradient_dtype is None and optimizer is None:
        return own
    if profile.is_inference:
        return _of_inference(profile, precision, gradient_dtype or optimizer)
    if precision is None and own.is_custom:
        flag = f"--gradient-dtype {gradient_dtype}" if gradient_dtype else f"--optimizer {optimizer}"
        raise UsageError(
            f"{profile.where} has the recipe custom, which says only bytes, so that {flag} means nothing for it; "
            f"give --precision, too, one of {', '.join(RECIPES)}"
        )
    optimizer = optimizer or own.optimizer
    if precision is None and gradient_dtype is None:
        return checked_recipe(own.name, own.gradient_dtype or gradient_format(own), optimizer)
    if precision in (None, own.name):
        return checked_recipe(own.name, gradient_dtype or own.gradient_dtype, optimizer)
    return checked_recipe(precision, gradient_dtype, optimizer)


def gradient_format(recipe: Recipe) -> GradientDtype:
    """The format that gradients add up in. Raises as :func:`state_of`."""
    usable = {size: name for name, size in _FORMATS.values() if name in state_recipe(recipe.name).gradient_dtypes}
    return usable[_per_parameter(recipe).trained[GRADIENTS]]


def _of_inference(profile: Profile, precision: str | None, of_training: str | None) -> Recipe:
    """The recipe of inference that ``precision`` names, which says only in how many bytes a parameter is kept."""
    if of_training is not None:
        raise UsageError(
            f"{profile.where} is of inference, which has neither gradients nor an optimizer; leave --gradient-dtype "
            "and --optimizer out"
        )
    if precision not in INFERENCE_RECIPES:
        raise UsageError(
            f"{profile.where} is of inference, for which there is no recipe {precision!r}; give --precision "
            f"{', '.join(INFERENCE_RECIPES[:-1])} or {INFERENCE_RECIPES[-1]}, or leave it out"
        )
    return Recipe(name=precision)


def require_recipe_of_mode(profile: Profile) -> None:
    """Require that what a profile keeps of parameters is what its mode needs. Raises UsageError."""
    recipe = profile.recipe
    if recipe.is_custom or (recipe.name in INFERENCE_RECIPES) == profile.is_inference:
        return
    usual = INFERENCE_RECIPES if profile.is_inference else RECIPES
    raise UsageError(
        f"{profile.where} is of {profile.mode} and has the recipe {recipe.name!r}, which is not; give it the recipe "
        f"{', '.join(usual)} or custom"
    )


def with_recipe(profile: Profile, recipe: Recipe) -> Profile:
    """The profile as if training followed another recipe; times and activations stay as they are.

    It is still the file that it was read from, whose fingerprint it has.

    Raises:
        UsageError: it states bytes and does not count its parameters, or the catalog has no such recipe.
    """
    if recipe == profile.recipe:
        return profile
    if recipe.is_custom:
        raise UsageError(f"{profile.where} counts parameters by the recipe {profile.recipe}, and states no bytes")
    _per_parameter(recipe)
    bare = [block for block in profile.blocks if not block.parameters + block.frozen_parameters]
    for block in bare:
        if len(bare) == len(profile.blocks) or state_of(block, profile.recipe).total:
            raise UsageError(
                f"{profile.where} has the recipe {profile.recipe}: block {block.id!r} does not say how many parameters "
                f"it has, only bytes, so that it cannot have the recipe {recipe.name}; leave --precision out, or "
                "profile the model again"
            )
    changed = profile.model_copy(
        update={
            "recipe": recipe,
            "blocks": tuple(block.without_bytes() for block in profile.blocks),
            "tied": tuple(each.without_bytes() for each in profile.tied),
        }
    )
    others = {kind: with_recipe(own, recipe) for kind, own in profile.of_kinds.items()}
    return changed.read_as(sha256_of(profile)).with_kinds(others)
