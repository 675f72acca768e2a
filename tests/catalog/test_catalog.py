"""Every file of the catalog is what its reader takes, and is listed without being named in code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeplan import catalog
from pipeplan.catalog import (
    ExportTarget,
    ModelSize,
    NamedConfiguration,
    configurations,
    export_target,
    model_sizes,
    names,
    read_table,
)
from pipeplan.costs.clusters import CLUSTERS, named_cluster
from pipeplan.costs.devices import PRESETS, DevicePreset, device_preset
from pipeplan.costs.recipes import RECIPES, StateRecipe, checked_recipe, running_bytes, state_of, state_recipe
from pipeplan.errors import UsageError
from pipeplan.examples import MODELS
from pipeplan.examples.models import family_of
from pipeplan.files import Block
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.rules.language import named_rules, shipped_rules
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, MemoryBytes

ROOT = Path(catalog.__file__).parent


def test_every_folder_has_a_reader_and_no_code() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"__pycache__"}
    code = "".join(path.read_text(encoding="utf-8") for path in ROOT.parent.rglob("*.py"))
    assert folders == set(re.findall(r'\b(?:names|read_table|read_text)\("(\w+)"', code))
    for folder in folders:
        files = list((ROOT / folder).iterdir())
        assert {path.suffix for path in files} <= {".json", ".toml"}
        assert len(names(folder)) == len(files) >= 1
        assert all(read_table(folder, name) for name in names(folder))


def test_lists_are_the_folders() -> None:
    assert (names("devices"), names("clusters"), names("recipes")) == (PRESETS, CLUSTERS, RECIPES)
    assert tuple(shipped_rules()) == names("rules")


@pytest.mark.parametrize("name", names("devices"))
def test_devices_are_read(name: str) -> None:
    assert device_preset(name).name == name


@pytest.mark.parametrize("name", names("clusters"))
def test_clusters_are_read(name: str) -> None:
    assert named_cluster(name).name == name


@pytest.mark.parametrize("name", names("rules"))
def test_rules_are_read(name: str) -> None:
    assert named_rules(name).name == name


RECIPE_ROWS = {  # compute, gradient, master, AdamW; a copy while a block runs
    "fp32": (4, 4, 0, 8, 0),
    "bf16": (2, 2, 0, 4, 0),
    "bf16-mixed": (2, 4, 4, 8, 0),
    "bf16-autocast": (0, 4, 4, 8, 2),
    "fp16-mixed": (2, 4, 4, 8, 0),
    "fp8-mixed": (2, 4, 4, 8, 0),
}


@pytest.mark.parametrize("name", names("recipes"))
def test_recipes_take_what_their_sources_say(name: str) -> None:
    """And with frozen parameters only a copy that computes, in float32 where that is cast at each use."""
    *kept, running = RECIPE_ROWS[name]
    sizes = (state_of(block, checked_recipe(name)) for block in (counting(3), counting(0, 3)))
    trained, frozen = sizes
    assert [trained[kind] for kind in (PARAMETERS, GRADIENTS, MASTER, OPTIMIZER)] == [3 * each for each in kept]
    assert frozen == MemoryBytes({PARAMETERS: 3 * (kept[0] or 4)})
    assert running_bytes(counting(1, 2), checked_recipe(name)) == 3 * running
    assert state_recipe(name).source


def counting(trained: int, frozen: int = 0) -> Block:
    return Block.of("a", "1ms", "2ms", trained=trained, frozen=frozen)


def test_gradients_and_optimizers_are_chosen_within_a_recipe() -> None:
    both = state_of(counting(1), checked_recipe("bf16-mixed", "bf16", "momentum"))
    assert (both[GRADIENTS], both[OPTIMIZER]) == (2, 4)
    assert state_of(counting(1), checked_recipe("bf16", optimizer="sgd")).total == 4
    assert checked_recipe("bf16-mixed", "fp32") == checked_recipe("bf16-mixed"), "those it has anyway"
    with pytest.raises(UsageError, match="recipe fp32 has gradients in fp32, not in bf16"):
        checked_recipe("fp32", "bf16")
    with pytest.raises(UsageError, match="no optimizer 'lion'; choose from adamw, momentum, sgd"):
        checked_recipe("fp32", optimizer="lion")


@pytest.mark.parametrize("name", names("targets"))
def test_targets_are_read(name: str) -> None:
    target = TypeAdapter(ExportTarget).validate_python(export_target(name))
    assert target.title
    assert target.source
    assert set(target.placements or ()) <= set(STRATEGIES)
    assert set(target.schedule_names) <= set(CLASSIC)
    assert set(target.schedules or ()) <= set(target.placements or ())
    assert set(target.zero) <= {0, 1, 2, 3}
    assert set(target.recompute) <= {"all", "selective"}
    assert {each for each in target.most_chunks if STRATEGIES[each].chunked} == set(target.most_chunks)


@pytest.mark.parametrize("size", model_sizes().values(), ids=lambda size: size.name)
def test_models_are_read(size: ModelSize) -> None:
    checked = TypeAdapter(ModelSize).validate_python(size)
    assert checked.dimensions
    assert min(checked.microbatch_sizes) >= 1
    assert (size.name in MODELS) == bool(size.reference)
    if size.reference:
        family = family_of(size.name)
        assert all(getattr(family, key) == value for key, value in size.dimensions.items() if isinstance(value, int))


@pytest.mark.parametrize("name", configurations())
def test_configurations_are_read(name: str) -> None:
    checked = TypeAdapter(NamedConfiguration).validate_python(configurations()[name])
    assert checked.text.startswith(f"{checked.config}(")
    assert "config.json of" in checked.source
    assert name not in model_sizes()


def test_what_no_reader_knows_is_refused() -> None:
    device, recipe = read_table("devices", "cpu"), read_table("recipes", "fp32")
    for kind, table in ((DevicePreset, device), (StateRecipe, recipe)):
        with pytest.raises(ValidationError, match="extra"):
            TypeAdapter(kind).validate_python(table | {"extra": 1})
    with pytest.raises(ValidationError, match="gradient"):
        TypeAdapter(StateRecipe).validate_python(recipe | {"gradient": 4})
    with pytest.raises(ValidationError, match="hidden"):
        type(family_of("gpt2-345m"))(**dict(model_sizes()["gpt2-345m"].dimensions) | {"hidden": "wide"})
    with pytest.raises(UsageError, match="there is no recipe 'sgd'; choose from bf16"):
        state_recipe("sgd")
