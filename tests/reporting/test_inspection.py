"""Looking a profile over: folding, sums, shares, what it warns of, and the command line of it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeplan.cli.main import main
from pipeplan.cli.profile_verb import _curve_line, _LinkPoints
from pipeplan.costs.inspection import Inspection, alike, cautions, mean_spread, operator_shares, sums, worst
from pipeplan.files import (
    Block,
    Cluster,
    CostRow,
    DeviceKind,
    Edge,
    LinkLevel,
    Profile,
    Source,
    TiedParameter,
    parse,
    read_cluster,
    read_profile,
    write_file,
)
from pipeplan.planning.request import Request, input_notes
from pipeplan.reporting.profile import print_inspection, print_worst
from support.paths import ROOT

SIZES = (1, 2, 4)


def row(size: int, *, scale: int = 1, **changes: Any) -> CostRow:
    costs: dict[str, Any] = {
        "microbatch_size": size,
        "forward_ns": 100 * size * scale,
        "backward_ns": 200 * size * scale,
        "input_grad_ns": 120 * size * scale,
        "weight_grad_ns": 90 * size * scale,
        "activation_bytes": 1000 * size,
        "weight_grad_bytes": 800 * size,
        "workspace_bytes": 300 * size * scale,
        "repeats": 5,
        "spread": {"forward_ns": 0.01, "backward_ns": 0.02},
    }
    return CostRow(**{**costs, **changes})


def block(
    id_: str, operator: str = "layer", *, scale: int = 1, sizes: tuple[int, ...] = SIZES, **changes: Any
) -> Block:
    costs = tuple(row(size, scale=scale, **changes) for size in sizes)
    return Block(id=id_, operator=operator, parameter_bytes=50 * scale, optimizer_bytes=100 * scale, costs=costs)


def chain(*blocks: Block) -> Profile:
    ids = [each.id for each in blocks]
    edges = [Edge(source=a, target=b, bytes_per_sample=64) for a, b in zip(ids, ids[1:], strict=False)]
    return Profile(name="chain", source=Source(method="measured", device="here"), blocks=blocks, edges=tuple(edges))


SOUND = chain(block("in", "embedding", scale=2), *(block(f"layer{index}") for index in range(5)), block("out", scale=3))


def kinds_of(profile: Profile, asked: tuple[int, ...] = ()) -> list[str]:
    return [caution.kind for caution in cautions(profile, asked)]


def text_of(profile: Profile, kind: str, asked: tuple[int, ...] = ()) -> str:
    (caution,) = (caution for caution in cautions(profile, asked) if caution.kind == kind)
    return caution.text


# Figures ----------------------------------------------------------------------------------------------------------


def test_identical_blocks_are_folded_and_only_these() -> None:
    assert [[each.id for each in group] for group in alike(SOUND)] == [
        ["in"],
        ["layer0", "layer1", "layer2", "layer3", "layer4"],
        ["out"],
    ]
    bigger = block("c").model_copy(update={"parameter_bytes": 51})
    assert [len(group) for group in alike(chain(block("a"), block("b"), bigger))] == [2, 1]


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_of_the_blocks(size: int) -> None:
    found = sums(SOUND, size)
    assert found["forward_ns"] == 100 * size * (2 + 5 + 3)
    assert found["weight_grad_ns"] == 90 * size * (2 + 5 + 3)
    assert found["activation_bytes"] == 1000 * size * 7
    assert found["workspace_bytes"] == 300 * size * 3


def test_a_time_that_a_block_lacks_has_no_sum() -> None:
    whole = block("b", input_grad_ns=None, weight_grad_ns=None)
    found = sums(chain(block("a"), whole), 1)
    assert (found["forward_ns"], found["backward_ns"], found["input_grad_ns"]) == (200, 400, None)


def test_shared_parameters_have_their_share_once() -> None:
    table = TiedParameter(name="table", blocks=("a", "b"), parameter_bytes=25, optimizer_bytes=50)
    profile = chain(block("a"), block("b"))
    (alone,) = operator_shares(profile, 1)
    (shared,) = operator_shares(profile.model_copy(update={"tied": (table,)}), 1)
    assert (alone.state_bytes, shared.state_bytes) == (400, 300)
    assert shared.state_share == 1


def test_shares_add_up() -> None:
    shares = operator_shares(SOUND, 4)
    assert [(share.operator, share.num_blocks) for share in shares] == [("layer", 6), ("embedding", 1)]
    assert shares[1].time_ns == 300 * 4 * 2
    assert shares[1].time_share == pytest.approx(0.2)
    assert shares[1].state_bytes == 2 * 100 + 200
    assert shares[1].activation_share == pytest.approx(1 / 7)
    for part in ("time_share", "state_share", "activation_share"):
        assert sum(getattr(share, part) for share in shares) == pytest.approx(1)


def test_rows_for_shards_do_not_count_twice() -> None:
    split = block("a").model_copy(update={"costs": (row(1), row(1, shards=2, forward_ns=60), row(1, recompute=True))})
    assert sums(chain(split), 1)["forward_ns"] == 100
    assert operator_shares(chain(split), 1)[0].time_ns == 300


# Cautions ---------------------------------------------------------------------------------------------------------


def test_a_sound_profile_has_none() -> None:
    assert cautions(SOUND) == []
    assert cautions(SOUND, (1, 3, 4)) == []


def test_missing_sizes() -> None:
    profile = chain(block("a"), block("b", sizes=(1, 2)), block("c", sizes=(1, 2)))
    assert text_of(profile, "missing-size") == (
        "block 'b' (and 1 like it) has no costs for micro-batch size 4, which others have; "
        "profile with --microbatch 1,2,4"
    )


def test_missing_sizes_of_shards() -> None:
    rows = (*(row(size) for size in SIZES), row(1, shards=2), row(2, shards=2))
    profile = chain(block("a"), block("b").model_copy(update={"costs": rows}))
    assert "block 'b' has no costs for micro-batch size 4 on 2 shards" in text_of(profile, "missing-size")


def test_asked_sizes_beyond_the_measured() -> None:
    assert kinds_of(SOUND, (1, 8, 16)) == ["extrapolation"]
    text = text_of(SOUND, "extrapolation", (1, 8, 16))
    assert "micro-batch size 8,16 is beyond the profile's (1,2,4)" in text
    assert text.endswith("profile with --microbatch 1,2,4,8,16")
    nothing_common = chain(block("a", sizes=(1,)), block("b", sizes=(2,)))
    assert "none that every block has" in text_of(nothing_common, "extrapolation", (1,))


def test_wide_gaps() -> None:
    assert kinds_of(chain(block("a", sizes=(1, 4)))) == []
    text = text_of(chain(block("a", sizes=(1, 4, 64))), "gap")
    assert "between micro-batch sizes 4 and 64" in text
    assert "such as 16" in text


def test_times_that_fall_with_size() -> None:
    rows = (row(1), row(2, forward_ns=10, backward_ns=50), row(4))
    profile = chain(block("a"), block("b").model_copy(update={"costs": rows}))
    assert "block 'b' takes 60ns at micro-batch size 2, less than 300ns at 1" in text_of(profile, "falling")


def test_large_spreads_the_worst_first() -> None:
    profile = chain(
        block("a", spread={"forward_ns": 0.2}),
        block("b", scale=2, spread={"forward_ns": 0.099}),
        block("c", scale=3, spread={"forward_ns": 0.1, "backward_ns": 0.553}),
    )
    found = [caution for caution in cautions(profile) if caution.kind == "spread"]
    assert [caution.block for caution in found] == ["c", "a"]
    assert (
        "block 'c': measurements of backward at micro-batch size 4 spread over 55.3% of their median" in found[0].text
    )
    assert "(5 runs)" in found[0].text


def test_spreads_are_ranked_by_the_time_they_concern() -> None:
    """A quarter of a long block is more than nine tenths of a short one."""
    short, long = block("a", spread={"forward_ns": 0.9}), block("b", scale=10, spread={"forward_ns": 0.25})
    assert [each.block for each in cautions(chain(short, long)) if each.kind == "spread"] == ["b", "a"]


def test_a_backward_unlike_its_halves_is_warned_of() -> None:
    """One was measured at 4.8 ms where its halves took 0.54, and nothing said so."""
    odd = block("b", scale=2, backward_ns=9000, input_grad_ns=500, weight_grad_ns=500)
    found = [each for each in cautions(chain(block("a"), odd, block("c", scale=50))) if each.kind == "halves"]
    assert [each.block for each in found] == ["b"]
    assert "'b': backward takes " in found[0].text
    tiny = block("b", backward_ns=9, input_grad_ns=2, weight_grad_ns=2)
    assert "halves" not in kinds_of(chain(block("a", scale=100), tiny)), "it hardly counts"


def test_the_spread_of_a_time_that_hardly_counts_is_no_matter() -> None:
    assert kinds_of(chain(block("a", weight_grad_ns=2, spread={"weight_grad_ns": 0.9}))) == []


def test_the_worst_of_each_kind_comes_first() -> None:
    """``c`` falls by more than ``b``, which comes before it."""
    faster = [
        Block(
            id=id_,
            operator="layer",
            costs=(
                row(1),
                row(2, forward_ns=each, backward_ns=each, input_grad_ns=each // 2, weight_grad_ns=each // 2, spread={}),
            ),
        )
        for id_, each in (("b", 100), ("c", 50))
    ]
    found = cautions(chain(block("a", spread={"forward_ns": 177.73}), block("d", spread={"forward_ns": 7.4}), *faster))
    assert [(each.kind, each.block) for each in found if each.kind == "falling"] == [("falling", "c"), ("falling", "b")]
    first = [(each.kind, each.block) for each in worst(found, 4)]
    assert first[:1] == [("missing-size", "b")], "size 4 is missing"
    assert [(each.kind, each.block) for each in worst([each for each in found if each.kind != "missing-size"], 9)] == [
        ("falling", "c"),
        ("spread", "a"),
        ("falling", "b"),
        ("spread", "d"),
    ]
    assert len(first) == 4


def test_a_profile_ends_with_its_worst_warnings() -> None:
    def told(profile: Profile) -> str:
        file = io.StringIO()
        print_worst(profile, "p.json", "other processes use this machine", file)
        return " ".join(file.getvalue().split())

    assert told(SOUND) == ""
    one = told(chain(block("a", spread={"forward_ns": 7.41})))
    assert one.startswith(
        "1 warning warning: block 'a': measurements of forward at micro-batch size 4 spread over 741.0%"
    )
    assert one.endswith("or with more --repeats other processes use this machine")
    many = told(chain(*(block(f"b{index}", scale=index + 1, spread={"forward_ns": index + 1}) for index in range(7))))
    assert many.startswith(
        "7 warnings, the worst of each kind first; pipeplan profile --show p.json has all warning: block 'b6'"
    )
    assert many.count("warning: ") == 3
    assert "other processes" not in told(chain(block("a", repeats=1)))


def test_searches_say_that_a_measured_profile_is_doubtful(tmp_path: Path) -> None:
    doubtful = chain(block("a", spread={"forward_ns": 0.4}), block("b", repeats=1))
    estimated = doubtful.model_copy(update={"source": Source(method="estimated")})
    for profile, told in ((doubtful, ["the profile has 2 warnings: pipeplan.inspect(profile)"]), (estimated, [])):
        assert list(input_notes(Request.of(profile, devices=1, mini_batch=4))) == told
    write_file(doubtful, str(tmp_path / "my p.json"))
    (told_of,) = input_notes(Request.of(read_profile(str(tmp_path / "my p.json")), devices=1, mini_batch=4))
    assert told_of == f"the profile has 2 warnings: pipeplan profile --show '{tmp_path}/my p.json'"


def test_searches_say_that_times_vary_as_much_as_predictions() -> None:
    for spread, said in ((0.1, ""), (0.35, ", and times that vary by 35% on average, and so do predictions")):
        noisy = chain(block("a", spread={"forward_ns": spread, "backward_ns": spread}))
        assert mean_spread(noisy) == pytest.approx(spread)
        (note,) = input_notes(Request.of(noisy, devices=1, mini_batch=4))
        assert note == f"the profile has 1 warning{said}: pipeplan.inspect(profile)"
    assert mean_spread(SOUND.model_copy(update={"blocks": ()})) == 0


def test_edges_that_do_not_lead_to_the_next_block_are_shown() -> None:
    assert "edges beside" not in printed(SOUND)
    first, *_, last = (each.id for each in SOUND.blocks)
    branched = SOUND.model_copy(update={"edges": (*SOUND.edges, Edge(source=first, target=last))})
    assert f"other edges than to the next block: {first} -> {last}\n" in printed(branched)


def test_shares_are_of_the_size_that_is_asked_for() -> None:
    assert "shares at micro-batch size 4;" in printed(SOUND)
    assert "shares at micro-batch size 1;" in printed(SOUND, (1,))
    assert "shares at micro-batch size 2;" in printed(SOUND, (1, 2, 8))
    small, large = (Inspection(SOUND, asked).figures()["operators"] for asked in ((1,), ()))
    assert small != large


def test_noisy_curves_say_so() -> None:
    curve = {
        "operation": "send",
        "level": "node",
        "num_devices": 2,
        "num_points": 5,
        "smallest_bytes": 1000,
        "largest_bytes": 2000,
    }
    for error, told in (
        (0.691, "points predicted from their neighbours are off by 69.1% in the median: noisy, measure again"),
        (0.05, "points predicted from their neighbours are off by 5.0% in the median"),
        (None, "too few points to judge"),
    ):
        assert _curve_line({**curve, "leave_one_out_error": error}).endswith(f"2kB, {told}")


def test_links_that_are_measured_say_so_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Each curve when its first point comes."""
    told: Any = _LinkPoints(SimpleNamespace(smallest_bytes=1000, largest_bytes=2000))
    for operation, devices, size in (("send", 2, 1000), ("send", 2, 2000), ("all_reduce", 2, 1000), ("send", 4, 1000)):
        told(SimpleNamespace(operation=operation, level="node", num_devices=devices, size=size, ns=5000))
    assert capsys.readouterr().err.splitlines() == [
        "pipeplan: measuring links, 1kB to 2kB",
        "pipeplan: send on node, 2 devices: measured",
        "pipeplan: all_reduce on node, 2 devices: measured",
        "pipeplan: send on node, 4 devices: measured",
    ]


def test_few_runs() -> None:
    assert "costs rest on 1 timed run, whose" in text_of(chain(block("a", repeats=1)), "few-repeats")
    assert kinds_of(chain(block("a", repeats=0))) == []  # not measured


def test_blocks_without_split_backward_where_others_have_it() -> None:
    whole = [block(id_, input_grad_ns=None, weight_grad_ns=None) for id_ in "bc"]
    assert kinds_of(chain(*whole)) == []
    assert "block 'b' (and 1 like it) has no input_grad_ns" in text_of(chain(block("a"), *whole), "no-split")


def test_zero_costs() -> None:
    assert "block 'a' takes no time in forward" in text_of(chain(block("a", forward_ns=0)), "zero-cost")
    nothing = block("a", backward_ns=None, input_grad_ns=0, weight_grad_ns=0, forward_ns=0)
    assert "takes no time in forward and backward" in text_of(chain(nothing), "zero-cost")
    weightless = block("a", activation_bytes=0)
    assert kinds_of(chain(block("b"), weightless)) == []
    assert "no block holds activations" in text_of(chain(weightless), "zero-cost")
    edge = Edge(source="in", target="layer3")
    free = SOUND.model_copy(update={"edges": (*SOUND.edges, edge)})
    assert "1 of 7 edges carry nothing and take no time, the first is in -> layer3" in text_of(free, "zero-cost")
    assert kinds_of(free.model_copy(update={"edges": (edge.model_copy(update={"transfer_ns": 0}),)})) == []


# Output -----------------------------------------------------------------------------------------------------------


def printed(profile: Profile, asked: tuple[int, ...] = (), *, details: bool = False) -> str:
    file = io.StringIO()
    print_inspection(Inspection(profile, tuple(asked)), file, details=details)
    return file.getvalue()


def test_printed() -> None:
    lines = [line.split() for line in printed(SOUND, details=True).splitlines()]
    assert lines[0] == ["chain:", "measured", "on", "here"]
    by_name = {tuple(line[:3]): line for line in lines}
    figures = ["200ns", "400ns", "240ns", "180ns", "2.0%", "2kB", "1.6kB", "600B"]
    assert by_name["layer0", "5", "2"] == ["layer0", "5", "2", *figures]
    assert by_name["2", "samples", "2us"][2:6] == ["2us", "4us", "2.4us", "1.8us"]
    assert by_name["embedding", "1", "2.4us"][3] == "20.0%"
    assert ["no", "warnings"] in lines


def test_a_summary_has_a_row_for_each_kind_and_details_have_a_row_for_each_case() -> None:
    rows = [row for block in SOUND.blocks[:2] for row in block.costs]
    cases = [row.model_copy(update={"shards": 2, "sequence_parallel": True, "recompute": True}) for row in rows[:1]]
    first = SOUND.blocks[0].model_copy(update={"costs": (*SOUND.blocks[0].costs, *cases)})
    profile = SOUND.model_copy(update={"blocks": (first, *SOUND.blocks[1:])})
    text = printed(profile)
    assert len(re.findall(rf"^ {first.id} ", text, re.MULTILINE)) == 1
    cases = "tp 1, 2; tp with * also divides the sequence; with and without recomputation"
    assert f"costs for samples 1, 2, 4; {cases}" in text
    assert text.index("parameters") < text.index("all blocks") < text.index(f" {first.id} ")
    text = printed(profile, details=True)
    assert len(re.findall(rf"^ {first.id} ", text, re.MULTILINE)) == 4
    heading = next(line for line in text.splitlines() if line.split()[:1] == ["block"])
    assert heading.split()[:5] == ["block", "alike", "samples", "tp", "recompute"]
    assert re.search(rf"^ {first.id} +1 +1 +2\* +yes ", text, re.MULTILINE)


def test_sizes_that_are_asked_for_are_shown_alone() -> None:
    text = printed(SOUND, (1,), details=True)
    assert re.search(r"^ layer0 +5 +1 ", text, re.MULTILINE)
    assert not re.search(r"^ layer0 +5 +[24] ", text, re.MULTILINE)
    assert "1 sample " in text
    assert "2 samples" not in text


def test_many_kinds_and_warnings_are_shortened() -> None:
    many = chain(*(block(f"b{index}", scale=index + 1, sizes=(1,), forward_ns=0) for index in range(100)))
    text = printed(many)
    assert "100 warnings" in text
    assert "... and 88 more; --json has them all" in text
    shown = re.findall(r"^ *(b\d+) ", text, re.MULTILINE)
    assert shown == [f"b{index}" for index in (*range(13), *range(43, 57), *range(87, 100))]
    assert text.count("30 more") == 2


def test_no_size_is_common() -> None:
    profile = chain(block("a", sizes=(1,)), block("b", sizes=(2,)))
    assert "2 warnings" in printed(profile)
    assert Inspection(profile).figures()["operators"] == []


# pipeplan profile -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command in a folder of its own; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipeplan", "profile", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


Command = Callable[..., tuple[int, str, str]]


def test_show(run: Command) -> None:
    write_file(SOUND, "p.json")
    code, out, err = run("--show", "p.json")
    assert (code, out, err) == (0, printed(SOUND), "")
    code, out, _ = run("--show", "p.json", "--microbatch", "8")
    assert code == 0
    assert "warning: micro-batch size 8 is beyond" in out


def test_show_as_json(run: Command) -> None:
    write_file(SOUND, "p.json")
    code, out, err = run("--show", "p.json", "--json", "--microbatch", "2,8")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["num_blocks"], found["num_kinds"], found["num_edges"]) == (7, 3, 6)
    assert found["microbatch_sizes"] == [1, 2, 4]
    assert found["blocks"][0]["alike"] == ["in"]
    assert [each["kind"] for each in found["warnings"]] == ["extrapolation"]
    assert found["sizes"][1] == {"microbatch_size": 2, **sums(SOUND, 2)}


def test_show_needs_no_torch(tmp_path: Path) -> None:
    write_file(SOUND, str(tmp_path / "p.json"))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"sys.argv = ['pipeplan', 'profile', '--show', {str(tmp_path / 'p.json')!r}]\n"
        "from pipeplan.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "layer0" in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "profiles").glob("*.json")), ids=lambda p: p.stem)
def test_profiles_that_ship_can_be_shown(path: Path, run: Command) -> None:
    code, out, err = run("--show", str(path))
    assert (code, err) == (0, "")
    assert "warning" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--show", "none.json"), "none.json: cannot be read"),
        (("--show", "bad.json"), "bad.json: not readable as JSON"),
        (("--show", "p.json", "gpt2-tiny"), "MODEL does not go with --show"),
        (("--show", "p.json", "-o", "q.json"), "--output does not go with --show"),
        (("--show", "p.json", "--repeats", "3"), "--repeats does not go with --show"),
        (("--communication-from", "bad.json", "-o", "x"), "Missing option '--cluster'"),
        (("--communication-from", "bad.json", "--cluster", "c.json"), "Missing option '-o'"),
        (("--communication-from", "bad.json", "--cluster", "c.json", "-o", "x"), "not readable as JSON of nccl-tests"),
        (("--communication-from", "none", "--cluster", "c.json", "-o", "x"), "none: cannot be read"),
        (("--communication-from", "bad.json", "--cluster", "p.json", "-o", "x"), "this is a profile, where a cluster"),
        (("gpt2-tiny", "-o", "x", "--level", "node"), "--level does not go with MODEL"),
        (("-o", "x"), "Missing argument '[MODEL]'"),
    ],
)
def test_refuses(arguments: tuple[str, ...], message: str, run: Command) -> None:
    write_file(SOUND, "p.json")
    write_file(CLUSTER, "c.json")
    Path("bad.json").write_text("{")
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert not Path("x").exists()


CLUSTER = Cluster(
    name="pair",
    source=Source(method="estimated"),
    devices=(DeviceKind(name="gpu", count=2),),
    levels=(LinkLevel(name="nvlink", group_size=2, latency_ns=5000, bandwidth_bytes_per_s=10**11),),
)

LOG = """# Collective test starting: {test}_perf
# nThread 1 nGpus 2 minBytes 1024 maxBytes 65536 step: 8(factor) warmup iters: 5 iters: 20 agg iters: 1
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
        1024           256     float    none      -1    10.00    0.10    0.10      0    10.10    0.10    0.10    N/A
        8192          2048     float    none      -1    20.00    0.41    0.41      0    20.10    0.41    0.41    N/A
       65536         16384     float    none      -1    60.00    1.09    1.09      0    60.10    1.09    1.09    N/A
"""


def test_communication_into_a_cluster(run: Command) -> None:
    write_file(CLUSTER, "c.json")
    for test in ("sendrecv", "all_reduce"):
        Path(f"{test}.log").write_text(LOG.format(test=test))
    arguments = ("--communication-from", "sendrecv.log", "--communication-from", "all_reduce.log")
    code, out, err = run(*arguments, "--cluster", "c.json", "-o", "d.json")
    assert (code, err) == (0, "cluster written to d.json\n")
    # 20 us against the root of 10 * 60 = 24.5
    assert out.splitlines()[0] == (
        "send on nvlink, 2 devices: 3 points, 1.024kB to 65.54kB, points predicted from their "
        "neighbours are off by 22.5% in the median"
    )
    found = read_cluster("d.json")
    assert [(curve.operation, curve.level, curve.points) for curve in found.measured] == [
        (operation, "nvlink", ((1024, 10_000), (8192, 20_000), (65536, 60_000))) for operation in ("send", "all_reduce")
    ]
    assert found.source.notes.endswith("Measured with nccl-tests: all_reduce.log.")


def test_communication_prints_one_object_or_the_cluster(run: Command) -> None:
    write_file(CLUSTER, "c.json")
    Path("log").write_text(LOG.format(test="sendrecv"))
    arguments = ("--communication-from", "log", "--cluster", "c.json", "--level", "nvlink")
    code, out, _ = run(*arguments, "-o", "d.json", "--json")
    (curve,) = json.loads(out)["curves"]
    assert (code, curve["operation"], curve["num_points"]) == (0, "send", 3)
    assert curve["leave_one_out_error"] == pytest.approx(0.2247, abs=1e-4)
    code, out, err = run(*arguments, "-o", "-")
    assert (code, err) == (0, "")
    assert parse(out, Cluster) == read_cluster("d.json")
