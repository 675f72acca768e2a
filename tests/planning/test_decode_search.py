"""Plans of decode steps: they are what was chosen, pass check, keep to memory, and say what is asked of them."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import unescape
from io import StringIO
from typing import Any, get_args

import pytest

import pipeplan as face
from builders.clusters import cluster_of
from builders.decoders import drawn_decoder, with_experts, with_pieces
from pipeplan import Cluster, InfeasibleError, Profile, UsageError
from pipeplan.errors import FileError
from pipeplan.files import Plan
from pipeplan.files.read_write import parse, to_json
from pipeplan.planning.decode_choice import DecodeSearch
from pipeplan.planning.decoding import LayerVolume, ServingAsked, Sharing
from pipeplan.reporting.html.report import report_of
from pipeplan.reporting.terminal import print_simulation
from pipeplan.runtime.decoding.layouts import BlockLayout
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.kinds import PARAMETERS
from support.marks import one_in

NAMED = [kv for kv in get_args(Sharing) if kv != "auto"]


def searched(profile: Profile, devices: int | None = 4, **asked: Any) -> face.Result:
    how: dict[str, Any] = {"time_limit": 5, "deterministic": True, "kv": "auto"}
    return face.search(profile, devices=devices, **(how | asked))


@pytest.mark.parametrize("kv", [*NAMED, "auto"])
@one_in(2, "pp", [1, 2], first=1)
def test_plans_are_what_was_chosen(kv: Any, pp: int) -> None:
    profile = drawn_decoder(5, device="RTX-A5000-24GB")
    found = searched(profile, kv=kv, pp=pp)
    plan, answer = found.plan, found.decode
    assert answer is not None
    chosen = DecodeSearch(profile, 4, 8, 400, ServingAsked(kv=kv), positions=pp).best()
    assert answer.token_ns == plan.token_ns == chosen.token_ns
    assert len({stage.devices for stage in plan.stages}) == pp
    assert face.check(plan, profile=profile).valid
    assert Plan.model_validate_json(to_json(plan)) == plan
    assert plan.is_inference
    assert plan.decode is not None
    assert (plan.decode.batch, plan.decode.context_tokens, plan.decode.kv) == (8, 400, answer.kv)
    assert_steps_are_counted_again(plan, profile)
    if kv != "auto":
        assert answer.kv == kv
        meshes = {text for stage in plan.stages for text in stage.configurations}
        axis = {"dp": "samples", "tp": "shards", "cp": "cache", "cp-q": "cacheq"}[kv]
        assert f"{axis}{4 // pp}" in meshes


def assert_steps_are_counted_again(plan: Plan, profile: Profile, cluster: Cluster | None = None) -> None:
    """A step of any stage that is longer or shorter by a ns is not what the profile and the links give."""
    for number, operation in enumerate(plan.operations):
        for other in (1, -1):
            wrong = replace(operation, duration_ns=operation.duration_ns + other)
            operations = (*plan.operations[:number], wrong, *plan.operations[number + 1 :])
            found = face.check(plan.model_copy(update={"operations": operations}), profile=profile, cluster=cluster)
            assert any("the profile's decode rows give" in each.message for each in found.problems)


@pytest.mark.parametrize("kv", ["cp", "cp-q", "auto"])
def test_check_counts_measured_pieces_and_links_of_a_cluster(kv: Any) -> None:
    profile, cluster = with_pieces(drawn_decoder(4, 2), 2), cluster_of(4, latency_ns=300)
    plan = searched(profile, None, cluster=cluster, kv=kv, pp=2).plan
    assert face.check(plan, profile=profile, cluster=cluster).valid
    assert face.check(plan, profile=profile).valid  # without the links times of exchanges are not known
    assert_steps_are_counted_again(plan, profile, cluster)
    free = with_pieces(drawn_decoder(4, 2), 2)
    assert_steps_are_counted_again(searched(free, 2, kv=kv).plan, free)


def test_experts_lie_on_devices_that_share_requests() -> None:
    """Where that is quicker, by rows of so many; each device keeps its experts alone."""
    profile = with_experts(drawn_decoder(4, 2, core_ns=0.01), 2)
    plan = searched(profile, 2, kv="auto", pp=1).plan
    [stage] = plan.stages
    assert stage.configurations.count("experts2") == 2
    assert face.check(plan, profile=profile).valid
    assert_steps_are_counted_again(plan, profile)
    kept = {block.id: block.parameter_bytes for block in profile.blocks}
    experts = sum(kept[f"layer{number}.ffn"] * 9 // 10 for number in range(2))
    most = sum(kept.values()) - experts // 2
    assert stage.state[PARAMETERS] <= most + 2
    whole = replace(stage, configurations=tuple(each.replace("experts", "samples") for each in stage.configurations))
    assert not face.check(plan.model_copy(update={"stages": (whole,)}), profile=profile).valid
    with pytest.raises(FileError, match="is not a mesh: write each axis once"):
        parse(to_json(plan).replace('"experts2"', '"]["'), Plan)
    requests = [BlockLayout.of(stage, stage.configurations.index("experts2")).slots(device, 5) for device in range(2)]
    assert requests == [range(2), range(2, 5)]
    split = replace(stage, configurations=("experts2-shards2",) * len(stage.blocks))
    with pytest.raises(UsageError, match="has experts on several devices and splits the block, too"):
        BlockLayout.of(split, 0)


def with_less_cache(plan: Plan, cached: int) -> Plan:
    """A plan of one stage that says so much of its cache, and of its peaks as much as goes with it."""
    [stage] = plan.stages
    less = stage.cached.total - cached
    memory = (
        replace(each, cache_bytes=each.cache_bytes - less, peak_bytes=each.peak_bytes - less)
        for each in plan.predicted.memory
    )
    predicted = plan.predicted.model_copy(update={"memory": tuple(memory)})
    return plan.model_copy(update={"stages": (stage.with_cache(cached),), "predicted": predicted})


def test_check_counts_the_cache_of_the_fullest_device_again() -> None:
    """One head of keys is on all four devices; of five requests one of four has two; the longest piece counts."""
    profile = drawn_decoder(5)
    alone = profile.model_copy(
        update={
            "blocks": tuple(
                each.model_copy(update={"cache_heads": 1}) if each.cache_bytes_per_token else each
                for each in profile.blocks
            )
        }
    )
    token = 2 * 4 * 16
    for own, asked, most, least in (
        (alone, {"kv": "tp"}, 8 * 400 * token, 2 * 400 * token),
        (profile, {"kv": "dp", "batch": 5}, 2 * 400 * token, 5 * 100 * token),
        (profile, {"kv": "cp", "context": 398}, 8 * 100 * token, 8 * 398 * token // 4),
    ):
        plan = searched(own, pp=1, memory=10**9, **asked).plan
        assert plan.stages[0].cached.total == most
        wrong = face.check(with_less_cache(plan, least), profile=own).problems
        assert [each.place for each in wrong if f"cache {most} bytes" in each.message] == ["stages[0].cache_bytes"]


def test_check_counts_words_of_a_decode_plan_again() -> None:
    """How caches are shared, and for how many requests there is memory: not one more, not one less."""
    profile = drawn_decoder(5)
    limit = 300_000
    plan = searched(profile, kv="cp", memory=limit, pp=2).plan
    assert plan.decode is not None
    most = plan.decode.max_requests
    assert most is not None
    for wrong in ({"kv": "tp"}, {"kv": "pp"}, {"max_requests": most + 1}, {"max_requests": most - 1}):
        other = plan.model_copy(update={"decode": plan.decode.model_copy(update=wrong)})
        found = face.check(other, profile=profile).problems
        assert [each.place for each in found] == [f"decode.{next(iter(wrong))}"], wrong


def test_room_for_more_requests_than_a_plan_can_say_is_said_to_be_for_as_many() -> None:
    profile = drawn_decoder(5)
    plan = searched(profile, kv="cp", memory=10**15, pp=2).plan
    assert plan.decode is not None
    assert plan.decode.max_requests == 1_000_000
    assert not face.check(plan, profile=profile).problems


def test_figures_have_what_is_asked_for() -> None:
    figures = searched(drawn_decoder(5), kv="cp").figures()
    assert figures["kv"] == "cp"
    token, rate = figures["token_ns"], figures["tokens_per_s"]
    assert isinstance(token, int)
    assert rate == 1e9 * 8 / token
    assert figures["max_requests"] is None
    own = 8 * 400 * 128
    cache = figures["cache_bytes"]
    assert isinstance(cache, list)
    assert len(cache) == 4
    assert own <= sum(cache) <= own + 4 * 8 * 128  # pieces that are not even
    assert figures["tokens_per_second"] == pytest.approx(rate)
    assert figures["model_flops_utilisation"] is None
    assert figures["status"] == "optimal"
    volumes = figures["volumes"]
    assert isinstance(volumes, list)
    assert [each["kept"] for each in volumes] == NAMED


def test_volumes_are_those_of_the_thesis_and_as_counted() -> None:
    """Per request of a layer of hidden 4096 with 32 heads on four devices."""
    profile = drawn_decoder(0)
    known = {"dimensions": {"hidden": 4096, "heads": 32}, "query_bytes_per_token": 8192, "cache_bytes_per_token": 16384}
    known |= {"mixture_bytes_per_token": 8192}
    block = profile.by_id["layer0.attention"].model_copy(update=known)
    found = {kept: LayerVolume.of(kept, block, 2, 4, 4) for kept in ("dp", "tp", "cp", "cp-q")}
    assert {kept: each.counted / 4 for kept, each in found.items()} == {
        "dp": 0,
        "tp": 12_288,
        "cp": 12_336,
        "cp-q": 7_728,
    }
    assert {kept: each.printed and each.printed / 4 for kept, each in found.items()} == {
        "dp": None,
        "tp": 49_152,
        "cp": 15_456,
        "cp-q": None,
    }


@pytest.mark.parametrize("seed", [0, 3, 6])  # whose quickest plan does not fit
def test_memory_at_the_last_step_is_within_the_limit(seed: int) -> None:
    profile = drawn_decoder(seed, core_ns=0.05)
    free = searched(profile, explain=True)
    assert free.decode is not None
    limit = free.decode.frontier[0].memory_bytes  # with which one stage on all devices just fits
    found = searched(profile, memory=limit)
    plan, answer = found.plan, found.decode
    assert answer is not None
    assert all(memory.peak_bytes <= limit for memory in plan.predicted.memory)
    assert answer.cache_bytes == plan.cache_bytes
    assert max(answer.cache_bytes) < limit
    assert answer.max_requests is not None
    assert answer.max_requests >= 8
    assert max(memory.peak_bytes for memory in free.plan.predicted.memory) > limit
    assert answer.token_ns >= free.decode.token_ns


def test_messages_of_a_cluster_are_in_the_tokens_time() -> None:
    profile = drawn_decoder(4)
    cluster = cluster_of(2, latency_ns=5_000, memory_bytes=10**9)
    found = searched(profile, None, cluster=cluster, pp=2)
    assert found.decode is not None
    assert found.decode.max_requests is not None
    assert face.check(found.plan, profile=profile, cluster=cluster).valid
    free = searched(profile, 2, pp=2)
    assert free.decode is not None
    assert found.decode.token_ns > free.decode.token_ns


def test_the_frontier_has_every_plain_way_between_its_ends() -> None:
    """One that other ways do not beat in both is a point; all are said with how many blocks are shared so."""
    profile = drawn_decoder(6, core_ns=0.01)
    answer = searched(profile, explain=True).decode
    assert answer is not None
    points = answer.frontier
    assert [each.memory_bytes for each in points] == sorted(each.memory_bytes for each in points)
    assert [each.token_ns for each in points] == sorted((each.token_ns for each in points), reverse=True)
    for kv in NAMED:
        own = searched(profile, kv=kv, pp=1).decode
        assert own is not None
        assert any(each.token_ns <= own.token_ns for each in points)
    assert points[-1].token_ns == min(each.token_ns for each in points)
    assert searched(profile).decode is not None


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"context": 500}, "rows for contexts of 10, 100, 400, not of 500"),
        ({"batch": 400}, "rows for batches of 1, 3, 8, not of"),
        ({"mini_batch": 8}, "kv asks for a plan of decode steps, which mini_batch is not for"),
        ({"scheduler": "gpipe"}, "kv asks for a plan of decode steps, which scheduler is not for"),
        ({"cp": 2}, "which cp is not for; leave it out; cp is of training, dcp shares caches"),
        ({"objective": "time"}, "is for servers"),
        ({"for_": "vllm"}, "kv is for plans of decode steps, and servers share caches in ways of their own"),
        ({"memory": 30_000}, r"a cache for 8 requests of 400 tokens does not fit .* there is room for \d+ such"),
        ({"kv": "dp", "dcp": 2}, "dcp=2 shares caches along the text, which kv dp does not"),
    ],
)
def test_what_cannot_be_asked_is_said(asked: dict[str, Any], text: str) -> None:
    with pytest.raises((UsageError, InfeasibleError), match=text):
        searched(drawn_decoder(0), **asked)


def test_profiles_of_training_have_no_decode_steps() -> None:
    with pytest.raises(UsageError, match="is of training, and decode steps are of inference; profile the model with"):
        searched(face.read_profile("profiles/gpt2-124m-cpu.json"))
    profile = drawn_decoder(0)
    none = profile.model_copy(update={"blocks": tuple(b.model_copy(update={"phases": ()}) for b in profile.blocks)})
    with pytest.raises(UsageError, match="says nothing of decode steps and their cache"):
        searched(none)


def test_a_batch_alone_asks_for_decode_steps_too() -> None:
    found = searched(drawn_decoder(0), kv=None, batch=3)
    assert found.decode is not None
    assert found.decode.batch == 3
    assert searched(drawn_decoder(0), 4, kv=None).decode is None


def test_they_show_themselves_as_the_command_line_does() -> None:
    found = searched(drawn_decoder(5), kv="cp")
    html, text = unescape(str(found._repr_html_())), found.text()
    for shown in (html, text):
        assert "between two tokens of a request" in shown
        assert "pipeplan.write(result.plan, 'plan.json') keeps the plan" in shown
        assert "dcp=4: 4 devices share each request's cache" in shown
        assert "samples/s" not in shown.partition("<svg")[0]
    assert "<svg" in html


def test_simulations_and_reports_say_how_caches_are_shared_in_the_fields_words() -> None:
    plan = searched(drawn_decoder(5), kv="cp", memory=10**9).plan
    file = StringIO()
    print_simulation(simulate(plan), file, 200)
    said = unescape(report_of([plan], (), None, "pipeplan report").html)
    for shown in (file.getvalue(), said):
        assert "decode context parallel" in shown
        assert "(cp)" not in shown
    assert "between two tokens of a request" in said
    assert "8 requests of 400 tokens at the last step" in said
    assert re.search(r"room for \d+ such requests", said)
    assert "10 % more memory" not in said


@pytest.mark.parametrize(
    ("kv", "said"),
    [
        ("cache2-shards2", "decode context parallel 2 x tensor parallel 2"),
        (
            "tp+samples2-cacheq4",
            "tensor parallel and data parallel 2 x decode context parallel (queries alone gathered) 4",
        ),
        ("pp", "a pipeline of single devices"),
        ("of one's own", "of one's own"),
    ],
)
def test_mixtures_are_said_in_the_fields_words(kv: str, said: str) -> None:
    plan = searched(drawn_decoder(5), kv="cp", memory=10**9).plan
    assert plan.decode is not None
    mixed = plan.model_copy(update={"decode": plan.decode.model_copy(update={"kv": kv})})
    file = StringIO()
    print_simulation(simulate(mixed), file, 400)
    assert said in " ".join(file.getvalue().split())
    assert said in unescape(report_of([mixed], (), None, "pipeplan report").html)


def test_progress_has_the_best_token_time_so_far_and_the_bound() -> None:
    """On any thread, for each number of groups that is looked at; the last is the answer's."""
    said: list[tuple[str, int, int, float]] = []
    profile = drawn_decoder(5)
    with ThreadPoolExecutor() as threads:
        found = threads.submit(searched, profile, progress=lambda *each: said.append(each)).result(60)
    assert found.decode is not None
    assert len(said) > 1
    best = [each[1] for each in said]
    assert best == sorted(best, reverse=True)
    assert best[-1] == found.decode.token_ns
    assert all(0 < each[2] <= best[-1] for each in said)
    assert said[0][0] == "decode steps of 1 group of requests"
    assert found.plan.programs == searched(profile).plan.programs
