"""What a refusal says would do, does: every flag and value that it names is tried."""

from __future__ import annotations

import math
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from builders.chains import chain_profile, split_chain
from builders.clusters import cluster_of
from integration.test_sharded_state import profile_of
from pipeplan.checker import check
from pipeplan.cli.main import cli
from pipeplan.errors import InfeasibleError, PipeplanError, UsageError
from pipeplan.files import Cluster, CostRow, read_profile, write_file
from pipeplan.partition.chain.autopipe import autopipe
from pipeplan.partition.dapple import dapple
from pipeplan.partition.graph.search import graphpipe
from pipeplan.partition.pipedream import pipedream
from pipeplan.partition.piper import piper
from pipeplan.partition.problem import NoPartitionError, Partition, PartitionProblem
from pipeplan.planning.candidates import _chains, uniform_choices
from pipeplan.planning.comparison import compare
from pipeplan.planning.frontier import frontier_request
from pipeplan.planning.infeasibility import ExplainShortage, shortage
from pipeplan.planning.plan_frontier import plan_frontier
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.time_limit import Limit
from pipeplan.units import parse_bytes
from pipeplan.workload.elements import MAX_DEVICES
from support.marks import one_in, slow_but

pytestmark = pytest.mark.counted

QUICK = ("--time-limit", "100ms", "--deterministic", "--scheduler", "1f1b")
SIZES = "the profile has costs for 1 to 4 samples per device; "


@pytest.fixture(scope="module")
def profile_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six blocks alike, each with 100 MB of parameters and as much for a sample, for 1, 2 and 4 samples."""
    chain = chain_profile(6, placed=False, parameter_bytes=100_000_000)
    rows = [
        CostRow(microbatch_size=size, forward_ns=size * 1000, backward_ns=size * 2000, activation_bytes=size * 10**8)
        for size in (1, 2, 4)
    ]
    blocks = tuple(block.model_copy(update={"costs": tuple(rows)}) for block in chain.blocks)
    path = tmp_path_factory.mktemp("chain") / "profile.json"
    write_file(chain.model_copy(update={"blocks": blocks}), str(path))
    return str(path)


@pytest.fixture(scope="module")
def split_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two blocks alike."""
    path = tmp_path_factory.mktemp("split") / "profile.json"
    write_file(split_chain(2, context=(1, 2, 4)), str(path))
    return str(path)


REFUSALS = [
    (
        "--devices 4 --microbatch-size 1 --replicas 4 --mini-batch 4",
        "choose --microbatch-size 4, or choose --replicas of 1",
    ),
    (
        "--devices 4 --microbatch-size 128",
        SIZES + "choose a --microbatch-size of at most 16, or --devices of at least 32",
    ),
    (
        "--devices 8 --microbatch-size 128",
        SIZES + "choose a --microbatch-size of at most 32, or --devices of at least 32",
    ),
    (
        "--devices 4 --microbatch-size 9 --mini-batch 36 --placement one-to-one",
        "choose a --microbatch-size of at most 4",
    ),
    ("--devices 4 --microbatch-size 64 --placement one-to-one", "choose a --microbatch-size of at most 4"),
    (
        "--devices 4 --microbatch-size 1 --replicas 4 --placement one-to-one",
        "choose a --microbatch-size of at least 4, or",
    ),
    (
        "--devices 4 --microbatch-size 2 --replicas 4",
        "choose a --microbatch-size of at least 4, or choose --replicas of 1, 2",
    ),
    ("--devices 4 --microbatch-size 1 --slices 4 --placement one-to-one", "choose a --microbatch-size of at least 2"),
    (
        "--devices 4 --microbatch-size 16 --replicas 1 --placement one-to-one",
        "does not work with 1 replica: it must divide the mini-batch of 256 (by default 4 micro-batches of 16 samples",
    ),
    ("--devices 4 --replicas 3 --placement one-to-one", "choose --replicas of 1, 2, 4"),
    ("--devices 4 --replicas 8 --placement one-to-one", "choose --replicas of 1, 2, 4"),
    ("--devices 4 --replicas 2 --mini-batch 9", "choose --mini-batch 10"),
    ("--devices 4 --mini-batch 7 --microbatch-size 2", "choose --microbatch-size 1, or --mini-batch 6 or 8"),
    ("--devices 4 --mini-batch 4 --microbatch-size 8", "choose --microbatch-size 4, or --mini-batch 8"),
    ("--devices 4 --mini-batch 8 --microbatches 3", "choose --microbatches 2, or --mini-batch 6 or 9"),
    ("--devices 9 --placement one-to-one", "lower --devices to 6"),
    ("--devices 3 --placement circular --chunks 3 --scheduler auto", "lower --devices to 2 or --chunks to 2"),
    (
        "--devices 8 --replicas 2 --placement circular --chunks 3 --scheduler auto",
        "lower --devices to 4 or --chunks to 1",
    ),
    ("--devices 4 --placement bidirectional --microbatches 3 --scheduler auto", "give --microbatches 4"),
    ("--devices 2 --memory 2GB --placement one-to-one --recompute none --microbatch-size 4", "raise --memory to"),
    (
        "--devices 2 --memory 2GB --placement one-to-one --recompute none --microbatch-size 4",
        "give --microbatch-size 1",
    ),
    ("--devices 2 --memory 1.5GB --placement one-to-one --recompute none --microbatch-size 2", "give --recompute auto"),
]
SPLIT_REFUSALS = [
    ("--devices 4 --memory 320MB --tp 1 --cp 1 --pp 2", ["give --tp auto --cp auto and leave --pp out"]),
    ("--devices 2 --memory 350MB --tp 1 --cp 1 --pp 1", ["raise --devices to 4 and give --tp auto"]),
    ("--devices 4 --memory 450MB --tp 1 --cp 1", ["give --tp auto"]),
    ("--devices 4 --memory 750MB --tp 1 --cp 1 --dp 4", ["leave --dp out"]),
    ("--devices 4 --memory 700MB --tp 1 --cp 2 --pp 1", ["give --tp auto", "give --cp auto", "leave --pp out"]),
]
_NUMBER = r"[0-9][0-9.]*[kMG]?B?"
_ADVICE = re.compile(rf"(--[a-z-]+)((?: (?:of|to|at|most|least|such|as))* {_NUMBER}(?:(?:,| or) [0-9]+\b)*| auto\b)")


def advised(text: str) -> Iterator[list[str]]:
    """The flags and values of everything that a refusal says to choose; several flags of one change together."""
    _, _, remedies = text.rpartition("; ")
    for change in remedies.split(", or "):
        found = [
            [[flag, value] for value in re.findall(rf"{_NUMBER}|auto", values)]
            for flag, values in _ADVICE.findall(change)
            if flag != "--shards"  # of another profile
        ]
        left_out = [word for flag in re.findall("leave (--[a-z-]+) out", change) for word in ("-", flag)]
        given = [[word for each in together for word in each] for together in zip_longest(*found, fillvalue=[])]
        yield from ([*left_out, *each] for each in given or [[]] * bool(left_out))


def refused(verb: str, path: str, *arguments: str) -> BaseException | None:
    done = CliRunner().invoke(cli, [verb, path, *arguments])
    return None if done.exit_code == 0 else done.exception


def require_advice_to_do(verb: str, path: str, asked: Sequence[str], says: Sequence[str]) -> None:
    error = refused(verb, path, *asked)
    assert isinstance(error, UsageError | InfeasibleError), error
    for words in says:
        assert words in str(error)
    changes = list(advised(str(error)))
    assert changes, str(error)
    for change in changes:
        left_out = [flag for mark, flag in pairwise(change) if mark == "-"]
        kept = [word for before, word in pairwise(["", *asked]) if not {before, word} & {*left_out}]
        found = refused(verb, path, *kept, *change[2 * len(left_out) :])
        assert found is None, f"{change}: {found}"


@one_in(2, "asked, says", REFUSALS, ids=[f"{asked}: {says}" for asked, says in REFUSALS])
def test_what_is_advised_does(profile_path: str, asked: str, says: str) -> None:
    require_advice_to_do("search", profile_path, (*QUICK, *asked.split()), [says])


@pytest.mark.parametrize(("asked", "says"), SPLIT_REFUSALS)
def test_sizes_that_are_fixed_are_advised_to_be_opened(split_path: str, asked: str, says: Sequence[str]) -> None:
    more = "--mini-batch", "8", "--time-limit", "1s"  # the last limit counts
    require_advice_to_do("search", split_path, (*QUICK, *asked.split(), *more), says)


def test_that_rows_do_not_fit_goes_before_what_others_could_not_be() -> None:
    """On 6 devices a mini-batch of 4 is none for the 3 replicas of whole blocks; 2 devices that split blocks fit it."""
    asked: dict[str, Any] = {"devices": 6, "positions": 2, "mini_batch": 4, "deterministic": True, "time_limit": 1.0}
    chain = split_chain(2, context=(1, 2, 4))
    chain = chain.model_copy(
        update={
            "blocks": tuple(
                block.model_copy(update={"costs": tuple(row for row in block.costs if row.context == 1)})
                for block in chain.blocks
            )
        }
    )
    request = Request.of(chain, memory_bytes=170 * 10**6, **asked)
    assert uniform_choices(request.within(None))
    assert not uniform_choices(request)
    said = [str(each) for propose in _chains(request) if isinstance(each := propose(), InfeasibleError)]
    assert any("by closed form every layout needs more" in each for each in said)
    with pytest.raises(InfeasibleError, match=r"6 devices of 170MB: .* would do.*; raise --memory to") as told:
        search_plan(request)
    assert told.value.would_do


def test_a_schedule_for_shared_stages_names_the_flag_that_makes_them(tmp_path: Path) -> None:
    profile = split_chain(3, context=(1, 2, 4))
    first, *others = profile.blocks
    path = str(tmp_path / "shared.json")
    write_file(profile.model_copy(update={"blocks": (first.model_copy(update={"shared": True}), *others)}), path)
    asked = (*QUICK[:-2], "--devices", "2", "--scheduler", "1f1b+", "--placement", "one-to-one", "--mini-batch", "8")
    with pytest.raises(UsageError, match=r"it needs a stage on all devices \(--shard-shared yes, .* 2 shards\)"):
        raise refused("search", path, *asked, "--shard-shared", "no") or AssertionError
    assert refused("search", path, *asked, "--shard-shared", "yes") is None


@pytest.mark.parametrize("verb", ["search", "compare"])
@pytest.mark.parametrize("flag", ["--dp 65536 --pp 2 --tp 1", "--dp 2 --pp 65536 --tp 1", "--dp 1 --pp 1 --tp 131072"])
def test_more_devices_than_a_plan_may_have_are_refused(profile_path: str, verb: str, flag: str) -> None:
    error = refused(verb, profile_path, *flag.split(), "--mini-batch", "8")
    assert isinstance(error, UsageError)
    assert f"131072 devices are more than the {MAX_DEVICES} that a plan may have; lower --devices" in str(error)


def test_more_workers_than_any_machine_starts_are_refused(profile_path: str) -> None:
    asked = ["search", profile_path, "--devices", "2", "--mini-batch", "8", "--workers"]
    for count in (1025, 10**20):
        result = CliRunner().invoke(cli, [*asked, str(count)])
        assert (result.exit_code, f"{count} is not in the range 1<=x<=1024" in result.output) == (2, True)


def test_a_clusters_limit_is_refused_as_one_that_is_given(profile_path: str) -> None:
    """What needs least recomputes, whoever says the limit: without one nothing would."""
    profile, limit = read_profile(profile_path), 10**9
    how: dict[str, Any] = {"placement": "one-to-one", "replicas": 2, "mini_batch": 8, "scheduler": "1f1b", "zero": 0}
    given = Request.of(profile, devices=2, memory_bytes=limit, **how)
    cluster = Request.of(profile, cluster=cluster_of(2, memory_bytes=limit), **how)
    wanted, found = (shortage(each, InfeasibleError("no"), 60, ExplainShortage()) for each in (given, cluster))
    assert "needs 2.51GB, 1.51GB too much" in str(wanted)
    assert "; that was found, and that less would not is not proved; raise" in str(wanted)
    there = str(wanted).replace("raise --devices to 6", "give a cluster of 6 devices")
    assert "or raise --devices to 3 and leave --dp out" in there  # fewer devices, of a cluster whole nodes
    assert str(found) == there.replace("raise --devices to 3 and", "give a cluster of 4 devices and")


def test_devices_without_any_memory_are_refused_as_others(profile_path: str) -> None:
    how: dict[str, Any] = {"placement": "one-to-one", "replicas": 2, "mini_batch": 8, "scheduler": "1f1b", "zero": 0}
    asked = Request.of(read_profile(profile_path), cluster=cluster_of(2, memory_bytes=0), **how)
    said = str(shortage(asked, InfeasibleError("no"), 60, ExplainShortage()))
    assert re.search(r"2 devices of 0: .* needs (\S+), \1 too much; .*raise --memory to", said), said


@pytest.mark.parametrize("devices", [2, 4])
def test_as_many_devices_as_are_advised_do_and_half_do_not(devices: int) -> None:
    """On nodes of four there are as many as fill them."""
    how: dict[str, Any] = {"mini_batch": 8, "memory_bytes": 210 * 10**6, "scheduler": "1f1b"}
    how |= {"time_limit": 0.1, "deterministic": True}

    def asked(count: int) -> Request:
        levels = [("node", 4, "1us", "100GB"), ("net", 32, "2us", "50GB")]
        cluster = None if devices == 2 else Cluster.of("c", count, levels=levels)
        return Request.of(split_chain(2, context=(1, 2, 4)), devices=None if cluster else count, cluster=cluster, **how)

    with pytest.raises(InfeasibleError) as told:
        search_plan(asked(devices))
    assert told.value.would_do[0]["num_devices"] == 8
    assert check(search_plan(asked(8)).plan).valid
    with pytest.raises(InfeasibleError):
        search_plan(asked(4))


def test_copies_that_must_divide_all_they_keep_are_advised() -> None:
    """One stage, which no split makes smaller: of more devices each keeps less by level 3 alone."""
    how: dict[str, Any] = {"mini_batch": 8, "memory_bytes": 80_000, "time_limit": 0.1, "deterministic": True}
    chain = profile_of([1000] * 12)  # of 18 bytes a parameter
    with pytest.raises(InfeasibleError, match=r"ZeRO 3 pp 1.*raise --devices to 4 \(tp 1 dp 4 ZeRO 3 pp 1"):
        search_plan(Request.of(chain, devices=2, positions=1, **how))
    assert {stage.zero for stage in search_plan(Request.of(chain, devices=4, positions=1, **how)).plan.stages} == {3}


@pytest.mark.parametrize("verb", ["search", "compare", "frontier --plans"])
def test_no_more_devices_than_the_cluster_has_are_planned_for(verb: str, profile_path: str, tmp_path: Path) -> None:
    write_file(cluster_of(4), str(tmp_path / "c.json"))
    said = [*verb.split(), profile_path, "--cluster", str(tmp_path / "c.json"), "--time-limit", "100ms"]
    refused = CliRunner().invoke(cli, [*said, "--devices", "8"])
    assert isinstance(refused.exception, UsageError)
    assert "has 4 devices, not 8; lower --devices to 4, or give a larger --cluster" in str(refused.exception)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--placement one-to-one --vp 3", "--chunks 3 does not apply to one-to-one; choose a --placement of circular"),
        ("--vp 4 --pp 2", "--chunks 4 x --pp 2 are 8 stages, and profile 'chain' has 6 blocks; lower --chunks to 3"),
        ("--vp 7", "--chunks 7 are 7 stages, and profile 'chain' has 6 blocks; lower --chunks to 6"),
    ],
)
@pytest.mark.parametrize("verb", ["search", "frontier --plans", "compare"])
def test_stages_that_positions_cannot_have_are_refused(verb: str, flags: str, why: str, profile_path: str) -> None:
    if "--placement" in flags and verb.startswith("frontier"):
        return  # it has all placements
    said = [*verb.split(), profile_path, "--devices", "4", *flags.split(), "--time-limit", "100ms"]
    refused = CliRunner().invoke(cli, said)
    assert isinstance(refused.exception, UsageError)
    assert why in str(refused.exception)


def test_stages_that_are_said_are_those_of_every_plan(profile_path: str) -> None:
    """Though all devices as copies of one stage would be quicker; placements with one stage each have no rows."""
    how: dict[str, Any] = {"mini_batch": 8, "chunks": 3, "time_limit": 0.1, "deterministic": True}
    profile = read_profile(profile_path)
    request, several = Request.of(profile, devices=4, **how), frontier_request(profile, devices=(4,), **how)
    (shortest, *_) = sorted(plan_frontier(several).points, key=lambda point: point.iteration_ns)
    for plan in (search_plan(request).plan, shortest.plan):
        assert {Counter(stage.devices for stage in plan.stages)[each.devices] for each in plan.stages} == {3}
    found = compare(request)
    assert "circular" in {row.placement for row in found.rows}
    assert not {row.placement for row in found.rows} & {"one-to-one", "bidirectional"}
    others = {each.placement: each.why for each in found.missing if each.schedule is None}
    assert others["one-to-one"].startswith("--chunks 3 does not apply to one-to-one")


def test_stages_of_a_graph_are_as_many_as_are_said() -> None:
    """Four blocks on four devices are no eight stages, and a schedule of one stage each is not what was asked for."""
    asked = Request.of(profile_of([1000] * 4), devices=4, mini_batch=8, chunks=2, scheduler="1f1b", time_limit=0.1)
    with pytest.raises(PipeplanError, match="--scheduler 1f1b does not apply"):
        search_plan(replace(asked, deterministic=True))


def test_a_larger_cluster_is_advised_where_it_has_too_few_devices() -> None:
    """As a flag cannot say more than there are: where nothing fits, and where sizes do not divide them."""
    how: dict[str, Any] = {"mini_batch": 8, "memory_bytes": 80_000, "time_limit": 0.1, "deterministic": True}
    chain = profile_of([1000] * 12)
    with pytest.raises(InfeasibleError, match=r"or give a cluster of 4 devices \(tp 1 dp 4 ZeRO 3 pp 1"):
        search_plan(Request.of(chain, cluster=cluster_of(2), positions=1, **how))
    assert search_plan(Request.of(chain, cluster=cluster_of(4), positions=1, **how)).plan.num_devices == 4
    with pytest.raises(UsageError, match=r"--pp 3 does not divide 4 devices; .* or give a cluster of 6 devices"):
        Request.of(chain, cluster=cluster_of(4), positions=3, **how)
    with pytest.raises(UsageError, match="or give --devices 6"):
        Request.of(chain, cluster=cluster_of(8), devices=4, positions=3, **how)


FIXED = "--devices 2 --placement one-to-one --microbatch-size 2 --microbatches 4"
ONE_STAGE = "--device v100-16gb --memory 3GB"
OTHERS = [
    ("search", f"{FIXED} --memory 1GB --scheduler rules --workers 1", ["raise --memory to "]),
    ("search", f"{FIXED} --memory 1.5GB --recompute none --scheduler rules --workers 1", ["--microbatch-size 1"]),
    ("search", f"{FIXED} --memory 1GB --rules 1f1b --time-limit 1s", ["raise --memory to "]),
    ("compare", f"{FIXED} --memory 1GB --time-limit 200ms", ["raise --memory to "]),
    ("frontier", f"{ONE_STAGE} --devices 1,2", ["raise --memory to 4.8GB", "lower --mini-batch to 2"]),
    ("frontier", f"{ONE_STAGE.replace('3GB', '4GB')} --devices 2", ["give --devices 4 --mini-batch 8"]),
    *(
        ("frontier", f"{ONE_STAGE} --devices 1,2 --mode {mode}", ["raise --memory to 4.8GB", "lower --mini-batch to "])
        for mode in ("min-time", "min-devices", "profile")
    ),
    *(
        ("frontier", f"--plans --devices 1,2 --memory 1GB --time-limit 8s --mode {mode}", ["raise --memory to "])
        for mode in ("all", "min-time", "min-devices", "profile")
    ),
    ("frontier", "--plans --devices 2 --memory 1GB --time-limit 8s", ["raise --devices to "]),
]


@pytest.mark.counted(1e-4)  # what would do is looked for with as many questions
@slow_but(
    "verb, asked, says",
    OTHERS,
    lambda each: "--plans" not in each[1],
    lambda each: "--mode" in each[1],
    ids=[f"{verb} {asked}" for verb, asked, _ in OTHERS],
)
def test_what_tuner_compare_and_frontier_advise_does(
    profile_path: str, verb: str, asked: str, says: Sequence[str]
) -> None:
    require_advice_to_do(verb, profile_path, asked.split(), says)


PLANNERS: dict[str, Callable[[PartitionProblem], Iterator[Partition]]] = {
    "PipeDream": pipedream,
    "Piper": piper,
    "DAPPLE": dapple,
    "AutoPipe": autopipe,
    "GraphPipe": graphpipe,
}


@pytest.mark.parametrize("name", PLANNERS)
def test_memory_that_planners_advise_does(profile_path: str, name: str) -> None:
    problem = PartitionProblem.of(read_profile(profile_path), 4, 16, memory_bytes=4 * 10**8)
    with pytest.raises(InfeasibleError, match=r"on 4 devices of 400MB; .* would do; raise --memory to") as error:
        next(PLANNERS[name](problem))
    memory = parse_bytes(str(error.value).rpartition(" ")[2])
    assert next(PLANNERS[name](replace(problem, memory_bytes=memory)))
    with pytest.raises(InfeasibleError):
        next(PLANNERS[name](replace(problem, memory_bytes=int(memory / 1.02))))
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.enough_bytes) == (str(error.value), memory)


def test_a_planner_says_how_many_devices_its_replicas_can_share(profile_path: str) -> None:
    problem = PartitionProblem.of(read_profile(profile_path), 7, 16, microbatch_sizes=[1])
    with pytest.raises(UsageError, match="lower --devices to 6"):
        next(autopipe(problem))
    assert next(autopipe(PartitionProblem.of(read_profile(profile_path), 6, 16, microbatch_sizes=[1])))


def test_a_planner_that_is_not_asked_why_does_not_look(profile_path: str) -> None:
    """A search goes on to other planners: what would do is looked for only where it is shown."""
    problem = PartitionProblem.of(read_profile(profile_path), 4, 16, memory_bytes=4 * 10**8)
    asked: list[int] = []
    error = NoPartitionError("nothing fits", problem, lambda memory: not asked.append(memory))
    assert not asked
    assert "raise --memory to 404MB" in str(error)
    assert asked


CLOCKLESS = [
    ("search", "--devices 4 --memory 300MB --placement one-to-one --microbatch-size 2 --scheduler 1f1b"),
]


@pytest.mark.parametrize(("verb", "asked"), CLOCKLESS)
def test_what_would_do_is_looked_for_by_work_where_time_is_work(
    profile_path: str, verb: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine where an age passes between two lines, the same is said."""
    command = verb, profile_path, *asked.split(), "--time-limit", "100ms", "--deterministic"
    wanted = refused(*command)
    assert wanted is not None
    assert "raise --memory to" in str(wanted)
    monkeypatch.setattr(Limit, "elapsed", property(lambda limit: 1e9))
    assert str(refused(*command)) == str(wanted)


def test_a_planner_says_what_would_do_whatever_the_clock(profile_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no clock counts it has no limit."""
    problem = PartitionProblem.of(read_profile(profile_path), 4, 16, memory_bytes=4 * 10**8, patience=math.inf)
    monkeypatch.setattr(Limit, "elapsed", property(lambda limit: 1e9))
    with pytest.raises(NoPartitionError, match="raise --memory to"):
        next(pipedream(problem))


def test_a_scheduler_that_is_not_known_is_refused_before_any_cut() -> None:
    with pytest.raises(UsageError, match="--scheduler 'zbh1' is not known; did you mean zb-h1"):
        Request.of(chain_profile(4), devices=2, num_microbatches=4, scheduler="zbh1")
