"""Recipes that a request asks for: what plans keep, what checking and simulating know, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import pipeplan
from pipeplan.costs.inspection import kept_state
from pipeplan.errors import UsageError
from pipeplan.files import Block, Plan, Profile, Recipe, TiedParameter, read_plan, read_profile, sha256_of, write_file
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, MemoryBytes

NUMBERS = 1000
BYTES = {  # of one parameter: compute, gradient, master, optimizer; and while a block runs
    ("fp32", None, None): (4, 4, 0, 8, 0),
    ("bf16", None, "sgd"): (2, 2, 0, 0, 0),
    ("bf16-mixed", "bf16", None): (2, 2, 4, 8, 0),
    ("bf16-autocast", None, "momentum"): (0, 4, 4, 4, 2),
    ("fp8-mixed", None, None): (2, 4, 4, 8, 0),
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Two blocks with as many parameters, by bf16-mixed."""
    blocks = [Block.of(f"b{n}", "1ms", "2ms", activation=64, trained=NUMBERS) for n in range(2)]
    write_file(Profile.of("two", blocks, recipe="bf16-mixed"), str(tmp_path / "two.json"))
    return str(tmp_path / "two.json")


def searched(path: str, **asked: str | None) -> Plan:
    plan = pipeplan.search(
        path,
        devices=2,
        microbatches=2,
        microbatch_size=1,
        placement="one-to-one",
        deterministic=True,
        time_limit=5,
        **asked,
    ).plan
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize(("asked", "each"), BYTES.items())
def test_a_plan_keeps_what_its_recipe_says(
    path: str, asked: tuple[str, str | None, str | None], each: tuple[int, ...], tmp_path: Path
) -> None:
    name, gradients, optimizer = asked
    plan = searched(path, precision=name, gradient_dtype=gradients, optimizer=optimizer)
    assert plan.recipe == Recipe(name=name, gradient_dtype=gradients, optimizer=optimizer or "adamw")
    assert plan.provenance.options["recipe"] == str(plan.recipe)
    assert plan.provenance.profile_sha256 == sha256_of(read_profile(path)), "made from that file"
    *kept, running = each
    for stage in plan.stages:
        assert [stage.state[kind] for kind in (PARAMETERS, GRADIENTS, MASTER, OPTIMIZER)] == [NUMBERS * b for b in kept]
    assert {operation.workspace_bytes for operation in plan.operations} == {NUMBERS * running}
    write_file(plan, str(tmp_path / "plan.json"))
    again = read_plan(str(tmp_path / "plan.json"))
    assert again == plan
    assert pipeplan.check(again, profile=path).valid
    assert pipeplan.simulate(again, profile=path).memory == plan.predicted.memory


def test_a_plan_of_another_recipe_than_it_says_is_not_right(path: str) -> None:
    plan = searched(path, precision="bf16").model_copy(update={"recipe": Recipe(name="fp32")})
    problems = pipeplan.check(plan, profile=path).problems
    assert "stages[0].parameter_bytes" in {each.place for each in problems}


def test_without_a_request_the_recipe_is_the_profiles(path: str) -> None:
    plan = searched(path)
    assert plan.recipe == Recipe(name="bf16-mixed")
    assert plan.predicted.memory[0].master_bytes == 4 * NUMBERS


def test_gradients_of_more_bytes_take_longer_to_sum(path: str) -> None:
    """Replicas send gradients in the format in which they add up."""
    times = []
    for gradients in ("bf16", "fp32"):
        result = pipeplan.search(
            path,
            cluster=pipeplan.read_cluster(str(_cluster(path))),
            replicas=2,
            microbatches=2,
            microbatch_size=2,
            gradient_dtype=gradients,
            zero=0,  # what replicas divide is summed elsewhere
            deterministic=True,
            time_limit=5,
        )
        times.append(max(stage.sync_ns for stage in result.plan.stages))
    assert times[0] < times[1]


def _cluster(path: str) -> Path:
    from pipeplan.costs.clusters import named_cluster

    target = Path(path).with_name("cluster.json")
    write_file(named_cluster("tessel", 2), str(target))
    return target


def counted(parameters: int = 10, frozen: int = 0) -> Block:
    return Block.of("a", "1ms", "2ms", trained=parameters, frozen=frozen)


STATED = Block.of("a", "1ms", "2ms", parameters=40, optimizer=80)


@pytest.mark.parametrize(
    ("make", "asked", "message"),
    [
        (lambda: Profile.of("p", [STATED]), {"precision": "fp32"}, "block 'a' does not say how many parameters it has"),
        (lambda: Profile.of("p", [STATED]), {"optimizer": "sgd"}, "has the recipe custom, which says only bytes"),
        *(
            (lambda: Profile.of("p", [counted()], recipe="fp32"), {"precision": name}, f"there is no recipe {said}")
            for name, said in {"bf61": "'bf61'", "": "''", "\x1b[31m": r"'\\x1b\[31m'", 300 * "x": "'x"}.items()
        ),
        (
            lambda: Profile.of("p", [counted()], recipe="fp32"),
            {"gradient_dtype": "bf16"},
            "recipe fp32 has gradients in fp32, not in bf16",
        ),
    ],
)
def test_a_recipe_that_a_profile_cannot_have(make: Callable[[], Profile], asked: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pipeplan.search(make(), devices=1, **asked)  # type: ignore[arg-type]  # texts of flags


def test_stated_bytes_and_a_named_recipe_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"blocks\[0\] states parameter_bytes, which the recipe 'fp32' says already"):
        Profile.of("p", [STATED], recipe="fp32")


def test_a_custom_profile_that_counts_can_have_another_recipe() -> None:
    block = STATED.model_copy(update={"parameters": 10})
    plan = pipeplan.search(
        Profile.of("p", [block]), devices=1, precision="bf16-mixed", time_limit=5, deterministic=True
    ).plan
    assert plan.stages[0].state.total == 18 * 10


def test_frozen_and_tied_at_once_is_refused() -> None:
    first, last = (counted().model_copy(update={"id": id_}) for id_ in "ab")
    frozen = last.model_copy(update={"parameters": 0, "frozen_parameters": 10})
    table = TiedParameter(name="table", blocks=("a", "b"), parameters=10)
    with pytest.raises(ValueError, match="of which block 'b' trains only 0: it has 10 frozen ones"):
        Profile(**{**dict(Profile.of("p", [first, frozen], recipe="fp32")), "tied": (table,)})


def test_what_is_tied_is_kept_once(path: str) -> None:
    blocks = read_profile(path).blocks
    table = TiedParameter(name="table", blocks=("b0", "b1"), parameters=300)
    profile = Profile(**{**dict(Profile.of("p", blocks, recipe="bf16-mixed")), "tied": (table,)})
    assert kept_state(profile) == MemoryBytes({PARAMETERS: 2, GRADIENTS: 4, MASTER: 4, OPTIMIZER: 8}) * 1700
