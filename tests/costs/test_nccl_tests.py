"""Output of nccl-tests, made up here in its documented forms, into the measured curves of a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeplan.costs.clusters import MeasuredRun, parse_nccl_tests, with_runs
from pipeplan.costs.communication import leave_one_out_error, time_on_curve, transfer_time
from pipeplan.errors import FileError, UsageError
from pipeplan.files import Cluster, DeviceKind, LinkLevel, MeasuredCurve, Source

LATENCY_US, BYTES_PER_US = 11.0, 21_000
# up to a twentieth off the straight line, as real measurements are
WOBBLE = (0.01, -0.03, 0.04, -0.02, 0.0, 0.05, -0.04, 0.02, -0.01, 0.03, -0.05, 0.04, 0.0, -0.02, 0.01, 0.02)
SIZES = [4**exponent for exponent in range(2, 15)]


def time_us(size: int, index: int = 4) -> float:
    """Latency plus size over bandwidth, and some wobble."""
    return round((LATENCY_US + size / BYTES_PER_US) * (1 + WOBBLE[index % len(WOBBLE)]), 2)


TIMES = {size: time_us(size, index) for index, size in enumerate(SIZES)}


def text_of(test: str = "sendrecv", *, ranks: int = 2, hosts: int = 1, wrong: str = "0", named: bool = True) -> str:
    """What a present version prints."""
    lines = ["# nccl-tests version 2.17.1 nccl-headers=22703 nccl-library=22703"] if named else []
    lines += [f"# Collective test starting: {test}_perf"] if named else []
    lines += [
        f"# nThread 1 nGpus {ranks // hosts} minBytes 16 maxBytes 268435456 step: 4(factor) warmup iters: 1 iters: 20 "
        "agg iters: 1 validation: 1 graph: 0 unalign: 0",
        "#",
        "# Using devices",
    ]
    lines += [
        f"#  Rank {rank:2d} Group  0 Pid {5000 + rank:6d} on node{rank * hosts // ranks:02d} device {rank:2d} "
        "[0000:0a:00] NVIDIA A100-SXM4-80GB"
        for rank in range(ranks)
    ]
    lines += [
        "#",
        "#                                                              out-of-place                       in-place",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw "
        "  busbw  #wrong ",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s) "
        " (GB/s)         ",
    ]
    for size, time in TIMES.items():
        rate = f"{size / time / 1000:.2f}"
        body = f"{time:.2f} {rate:>7} {rate:>7}"
        lines.append(f"{size:12d} {size // 4:13d} float none -1 {body} {wrong:>6} {time + 1:.2f} {rate} {rate} N/A")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 5.4321", "#"]
    lines += [f"# Collective test concluded: {test}_perf"] if named else []
    return "\n".join(lines) + "\n"


def json_of(test: str = "sendrecv", *, processes: int = 2, gpus: int = 1) -> dict[str, Any]:
    """What ``-J`` writes."""
    devices = [
        {"rank": rank * gpus, "group": 0, "pid": 5 + rank, "hostname": "node00", "device": rank}
        for rank in range(processes)
    ]
    return {
        "version": 2,
        "args": [f"./build/{test}_perf", "-J", "out.json"],
        "env": ["HOME=\\/root"],
        "config": {"nthreads": 1, "ngpus": gpus, "devices": devices},
        "results": [
            {"size": size, "count": size // 4, "type": "float", "out_of_place": {"time": time, "nwrong": 0.0}}
            for size, time in TIMES.items()
        ],
    }


def expected(size: int) -> int:
    return round(TIMES[size] * 1000)


# Reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "operation"),
    [
        ("sendrecv", "send"),
        ("all_reduce", "all_reduce"),
        ("all_gather", "all_gather"),
        ("reduce_scatter", "reduce_scatter"),
        ("alltoall", "all_to_all"),
        ("broadcast", "broadcast"),
    ],
)
def test_text_and_json_say_the_same(test: str, operation: str) -> None:
    points = tuple((size, expected(size)) for size in SIZES)
    assert parse_nccl_tests(text_of(test, ranks=8), "log") == (MeasuredRun(operation, 8, 1, points),)
    found = parse_nccl_tests(json.dumps(json_of(test, processes=2, gpus=4)), "log")
    assert found == (MeasuredRun(operation, 8, 1, points),)


def test_several_runs_in_one_file() -> None:
    text = text_of("all_reduce", ranks=8) + text_of("sendrecv") + text_of("all_reduce", ranks=16, hosts=2)
    found = parse_nccl_tests("$ mpirun -np 8 anything\n" + text, "log")
    assert [(run.operation, run.num_devices, run.num_hosts) for run in found] == [
        ("all_reduce", 8, 1),
        ("send", 2, 1),
        ("all_reduce", 16, 2),
    ]


def test_old_text_takes_the_test_from_the_file_name_or_the_command() -> None:
    assert parse_nccl_tests(text_of(named=False), "logs/all_gather_perf.txt")[0].operation == "all_gather"
    command = "$ ./build/reduce_scatter_perf -b 16 -e 256M -f 4 -g 2\n"
    assert parse_nccl_tests(command + text_of(named=False), "log")[0].operation == "reduce_scatter"
    with pytest.raises(FileError, match="does not say which test ran; name the file after it"):
        parse_nccl_tests(text_of(named=False), "log")


def test_old_table_without_root_and_with_rounding_errors() -> None:
    text = """# nThread 1 nGpus 2 minBytes 8 maxBytes 16 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#   Rank  0 Pid  22009 on  host device  0 [0x00] Tesla V100
#   Rank  1 Pid  22009 on  host device  1 [0x00] Tesla V100
#       size         count    type   redop     time   algbw   busbw     error     time   algbw   busbw     error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)               (us)  (GB/s)  (GB/s)
           8             2   float     sum    20.50    0.00    0.00   4.0e-07    19.00    0.00    0.00   4.0e-07
          16             4   float     sum    21.25    0.00    0.00   4.0e-07    19.00    0.00    0.00   4.0e-07
"""
    (run,) = parse_nccl_tests(text, "all_reduce_perf.log")
    assert (run.num_devices, run.points) == (2, ((8, 20_500), (16, 21_250)))


def test_ranks_of_one_group_only() -> None:
    """Split runs have several groups that communicate at once."""
    text = text_of("all_reduce", ranks=8)
    for rank in range(4, 8):
        text = text.replace(f"Rank {rank:2d} Group  0", f"Rank {rank:2d} Group  1")
    assert parse_nccl_tests(text, "log")[0].num_devices == 4


def test_sizes_measured_several_times_have_their_median() -> None:
    data = json_of()
    data["results"] = [
        {"size": size, "out_of_place": None if size else {"time": time}, "in_place": {"time": time, "nwrong": None}}
        for size, time in [(0, 0.0), (64, 9.0), (64, 5.0), (64, 7.0)]
    ]
    assert parse_nccl_tests(json.dumps(data), "log")[0].points == ((0, 1), (64, 7000))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no measurement of nccl-tests in it"),
        ("hello\nworld\n", "no measurement of nccl-tests in it"),
        (text_of(wrong="3"), r"line \d+: nccl-tests found 3 wrong values; measure again"),
        (text_of().replace(" time ", " cputime "), "has no column 'time'; run nccl-tests without -C"),
        (text_of("scatter"), "scatter_perf has no curve in a cluster; give one of sendrecv_perf"),
        (text_of().replace(" float none ", " float "), r"line \d+: has 12 columns, the table's head has 13"),
        (
            text_of().replace(f" {TIMES[16]:.2f} ", " soon ", 1),
            "expected bytes, a time in us and wrong values, got '16'",
        ),
        (text_of().replace(f" {TIMES[16]:.2f} ", " nan ", 1), "16 bytes in nan us cannot be"),
        ('{"args": ["all_reduce_perf"], "config"', "not readable as JSON"),
        ('{"args": []}', "not the JSON of nccl-tests: IndexError"),
        ('{"args": ["x"], "config": {"nthreads": 1}}', "not the JSON of nccl-tests: KeyError: 'ngpus'"),
        (json.dumps(json_of()).replace('"time"', '"cpu_time"'), "not the JSON of nccl-tests: KeyError: 'time'"),
        (json.dumps({**json_of(), "results": []}), "no measurement of nccl-tests in it"),
        (
            json.dumps(json_of()).replace('"nthreads": 1', '"nthreads": 1e999'),
            "not the JSON of nccl-tests: OverflowError",
        ),
        (json.dumps(json_of()).replace('"size": 16,', '"size": Infinity,'), "expected bytes, a time in us"),
        (
            json.dumps({**json_of(), "results": [{"size": 16, "out_of_place": {"time": 10**400}}]}),
            "expected bytes, a time in us",
        ),
        (f'{{"args": [{480 * "["}{480 * "]"}]}}', "not the JSON of nccl-tests: (RecursionError|KeyError)"),
        (f"# nThread {5000 * '9'} nGpus 1", "no measurement of nccl-tests in it"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        parse_nccl_tests(text, "log")


# Curves -----------------------------------------------------------------------------------------------------------


def points_of(text: str) -> tuple[tuple[int, int], ...]:
    return parse_nccl_tests(text, "log")[0].points


def test_leave_one_out_error_of_a_sample() -> None:
    """Times within a twentieth of latency plus size over bandwidth, four times apart: told within a tenth."""
    error = leave_one_out_error(points_of(text_of()))
    assert error is not None
    assert 0 < error < 0.1


def test_leave_one_out_error_by_hand() -> None:
    """Left out, (4, 30) lies between (1, 10) and (16, 40) halfway in the logarithm: the root of 400, a third off."""
    assert leave_one_out_error([(1, 10), (4, 30), (16, 40)]) == pytest.approx(1 / 3)
    assert leave_one_out_error([(1, 10), (10, 100), (100, 1000), (1000, 10_000)]) == 0  # a power law is met
    assert leave_one_out_error([(1, 10), (2, 20)]) is None


@pytest.mark.parametrize("points", [((0, 5), (1, 7), (2, 6), (64, 90)), points_of(text_of())])
def test_a_curve_meets_its_points_and_never_falls(points: tuple[tuple[int, int], ...]) -> None:
    highest = 0
    for size, ns in points:
        highest = max(highest, ns)
        assert time_on_curve(points, size) == highest
    told = [time_on_curve(points, size) for size in range(2 * points[3][0])]
    assert told == sorted(told)


def cluster_of(*group_sizes: int, measured: tuple[MeasuredCurve, ...] = ()) -> Cluster:
    levels = tuple(
        LinkLevel(name=f"level{index}", group_size=size, latency_ns=20_000, bandwidth_bytes_per_s=10**9)
        for index, size in enumerate(group_sizes)
    )
    devices = (DeviceKind(name="gpu", count=group_sizes[-1]),)
    return Cluster(name="here", source=Source(method="estimated"), devices=devices, levels=levels, measured=measured)


def test_the_cluster_takes_as_long_as_was_measured() -> None:
    """Also where that is less than the level's latency."""
    points = points_of(text_of())
    cluster = with_runs(cluster_of(2), parse_nccl_tests(text_of(), "log"))
    for size in (16, 100, 65536, 10**6):
        latency, occupancy = transfer_time(cluster, 0, 1, size)
        assert latency + occupancy == time_on_curve(points, size)
        assert latency <= 20_000
    assert transfer_time(cluster_of(2), 0, 1, 10**6) == (20_000, 10**6)


def test_a_curve_replaces_the_one_of_the_same_case() -> None:
    old = MeasuredCurve(operation="send", level="level0", num_devices=2, points=((1, 1),))
    other = old.model_copy(update={"operation": "all_reduce"})
    found = with_runs(cluster_of(2, measured=(old, other)), parse_nccl_tests(text_of(), "log"), origin="log")
    assert [(curve.operation, len(curve.points)) for curve in found.measured] == [("send", 13), ("all_reduce", 1)]
    assert found.source.notes == "Measured with nccl-tests: log."


def test_which_level_was_measured() -> None:
    def level(text: str, *group_sizes: int, asked: str | None = None) -> str:
        return with_runs(cluster_of(*group_sizes), parse_nccl_tests(text, "log"), asked).measured[0].level

    assert level(text_of(ranks=8), 4, 8, 16) == "level1"
    assert level(text_of(ranks=4), 4, 8) == "level0"
    assert level(text_of(ranks=4, hosts=2), 8) == "level0"
    assert level(text_of(ranks=4, hosts=2), 4, 8, asked="level1") == "level1"
    with pytest.raises(UsageError, match="on 2 hosts; say with --level which of"):
        level(text_of(ranks=4, hosts=2), 4, 8)
    with pytest.raises(UsageError, match="on 8 devices, but no level of cluster 'here' joins more than 4"):
        level(text_of(ranks=8), 4)
    with pytest.raises(UsageError, match="level 'ether' is not one of cluster 'here'"):
        level(text_of(), 4, asked="ether")
    with pytest.raises(UsageError, match="does not fit a cluster"):
        level(json.dumps({**json_of(), "results": [{"size": 10**17, "out_of_place": {"time": 1}}]}), 4)


@pytest.mark.timeout(60)
def test_a_word_of_a_million_letters_is_read_at_once() -> None:
    """It took minutes, looked for from each of its letters on."""
    (run,) = parse_nccl_tests(f"# {'x' * 10**6}\n{text_of()}", "log")
    assert run.operation == "send"
