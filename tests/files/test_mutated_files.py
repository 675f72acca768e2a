"""Files are data from strangers: 5,000 damaged profiles and plans, and some that ask for too much.

What is no longer valid is refused with its path and the reason; what still reads as a plan is checked. Nothing
ends in another exception, takes long or takes much memory.
"""

from __future__ import annotations

import json
import random
import re
import resource
from collections import Counter

import pytest

from builders.chains import chain_plan, chain_profile, chain_workload, shared_workload
from builders.orders import gpipe_orders, serial_orders
from builders.plans import plan_of
from pipeplan.checker import Report, check
from pipeplan.errors import FileError
from pipeplan.files import Cluster, FileModel, Plan, Profile, parse, sha256_of, to_json
from support.damage import Data, damage
from support.marks import always, slow_but

NUM_FILES = 5_000
PIECES = 10
"""The files are made and read in so many tests, so that a failure names its seed."""


def plans() -> list[Plan]:
    shared = shared_workload(2, 3, lag=3)
    unequal = chain_workload(3, 4, sizes=[2, 4, 1], lag=2)
    return [
        chain_plan(3, 4, repetend=True, parameter_bytes=10, workspace_bytes=5, memory_bytes=10**6),
        chain_plan(2, 3, split=(12, 9), lag=7, weight_grad_bytes=1500, full_names=True),
        plan_of(shared, serial_orders(shared), first={operation.id: 0 for operation in shared.operations}),
        plan_of(unequal, gpipe_orders(unequal)),
    ]


def profiles() -> list[Profile]:
    return [
        chain_profile(3, parameter_bytes=10, workspace_bytes=5),
        chain_profile(2, split=(12, 9), lag=7, weight_grad_bytes=1500),
        chain_profile(4, placed=False),
    ]


PLANS = plans()
FILES: list[tuple[type[FileModel], Data]] = [
    *((Plan, json.loads(to_json(plan))) for plan in PLANS),
    *((Profile, json.loads(to_json(profile))) for profile in profiles()),
]


def damaged(rng: random.Random) -> tuple[type[FileModel], bytes]:
    """One file with one to three damages."""
    model, data = rng.choice(FILES)
    return model, damage(rng, data)


# What must hold ------------------------------------------------------------------------------------------------


def read(model: type[FileModel], text: bytes) -> str:
    """Read a file, require a clean outcome and say which: refused, accepted, valid or invalid."""
    try:
        found = parse(text, model, "file.json")
    except FileError as error:
        require_reason(error, model, text)
        return "refused"
    assert parse(to_json(found), model) == found
    if isinstance(found, Plan):
        report = check(found)
        require_places(report)
        return "valid" if report.valid else "invalid"
    assert isinstance(found, Profile)
    assert len(sha256_of(found)) == 64
    assert len(found.topological_order()) == len(found.blocks)
    require_places(check(PLANS[0], found))
    return "accepted"


def require_reason(error: FileError, model: type[FileModel], text: bytes) -> None:
    """The file is named; each problem is one line that begins with a path and goes on with a reason."""
    assert str(error).startswith("file.json: ")
    if not error.problems:
        assert re.search(r"not readable as JSON: .|this is a \w+, where a \w+ is needed; .", str(error))
    for problem in error.problems:
        assert problem.isprintable()
        assert len(problem) < 2000
        key = problem.split(":")[0].split(".")[0].split("[")[0].split(" ")[0]
        known = key in model.model_fields or key in ("file", "...", "edges", "placement")
        assert known or key.strip("'\"")[:10].encode() in text or "\\" in key, problem


def require_places(report: Report) -> None:
    for problem in report.problems:
        assert problem.place
        assert problem.message
        assert "\n" not in str(problem)


@slow_but("seed", range(PIECES), lambda seed: seed < 2, always)
def test_damaged_files(seed: int) -> None:
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(NUM_FILES // PIECES):
        model, text = damaged(rng)
        outcomes[read(model, text)] += 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
    assert outcomes["refused"] > 200, outcomes
    assert outcomes["invalid"] > 25, outcomes
    assert outcomes["accepted"] > 10, outcomes


# Files that ask for too much -----------------------------------------------------------------------------------


def grown(model: FileModel, path: str, value: object) -> str:
    """A file with another value at a path such as ``stages.0.devices``."""
    data = json.loads(to_json(model))
    *parents, last = path.split(".")
    part = data
    for key in parents:
        part = part[int(key)] if isinstance(part, list) else part[key]
    part[int(last) if isinstance(part, list) else last] = value
    return json.dumps(data)


def ring(size: int) -> str:
    """A profile whose edges go round."""
    profile = json.loads(to_json(profiles()[2]))
    profile["blocks"] = [profile["blocks"][0] | {"id": f"b{index}"} for index in range(size)]
    profile["edges"] = [{"source": f"b{index}", "target": f"b{(index + 1) % size}"} for index in range(size)]
    return json.dumps(profile)


CHAIN, PROFILE = PLANS[0], profiles()[0]
CLUSTER = Cluster.model_validate(
    {"name": "c", "source": {"method": "estimated"}, "devices": ({"name": "d", "count": 2},)}
)

GREEDY = {
    "a million micro-batches": (Plan, grown(CHAIN, "num_microbatches", 10**6), r"starts_ns\[0F\] has 4 starts"),
    "a trillion samples": (Plan, grown(CHAIN, "microbatch_size", 10**6), r"starts_ns\[0F\] has 4 starts"),
    "a stage on a million devices": (Plan, grown(CHAIN, "stages.0.devices", list(range(10**6))), "stands on device 3"),
    "more devices than a plan has": (Plan, grown(CHAIN, "devices", [{}] * 70_000), "devices: List should have at most"),
    "a copy of a million": (Profile, grown(PROFILE, "placement.num_devices", 10**6), "placement.num_devices"),
    "a cluster of a billion": (
        Cluster,
        grown(CLUSTER, "devices", [{"name": "d", "count": 65536}] * 20_000),
        "devices add up to 1310720000",
    ),
    "half a million wrong entries": (Plan, grown(CHAIN, "programs.0", ["x"] * 500_000), r"programs\[0\]\[0\]: String"),
    "half a million wrong starts": (Plan, grown(CHAIN, "starts_ns.0F", [-1] * 500_000), r"starts_ns.0F\[0\]"),
    "half a million wrong objects": (Plan, grown(CHAIN, "operations", [0] * 500_000), r"operations\[0\]: Input"),
    "a number of 100,000 digits": (Plan, f'{{"name": {"9" * 10**5}}}', "not readable as JSON: number out of range"),
    "nesting without end": (Plan, "[" * 10**6, "not readable as JSON: recursion limit"),
    "a long cycle": (Profile, ring(5000), r"edges form a cycle of 5000: b0 -> b1(.*)\.\.\.(.*) -> b0"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("model", "text", "reason"), GREEDY.values(), ids=list(GREEDY))
def test_files_that_ask_for_too_much_are_refused_at_once(model: type[FileModel], text: str, reason: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileError, match=reason) as caught:
        parse(text, model, "file.json")
    assert len(str(caught.value)) < 4000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 250_000  # KiB


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(60)
def test_plans_that_make_checking_long_are_still_checked_at_once() -> None:
    """Groups of many devices, actions of many micro-batches, dependencies said again and again - and no programs."""
    data = json.loads(to_json(chain_plan(2, 3)))
    number, depth = 20_000, 2_000
    data |= {"num_microbatches": depth, "devices": [{}] * number, "programs": [[]] * number}
    data["predicted"]["memory"] = data["predicted"]["memory"][:1] * number
    for stage in data["stages"]:
        stage |= {"devices": list(range(number)), "shards": number}
    data["starts_ns"] = {id_: [0] * depth for id_ in data["starts_ns"]}
    hop = {"source_device": 0, "target_device": 1}
    data["dependencies"] = [*data["dependencies"], *([{"source": "0F", "target": "1F", "hops": [hop] * 5}] * depth)]
    report = check(parse(json.dumps(data), Plan))
    assert report.num_problems > 4 * number
    assert len(report.problems) < 1000
