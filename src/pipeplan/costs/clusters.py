"""Clusters: what their maker sells, those that the papers measured on, and link times that nccl-tests measured.

A maker's has nodes with an adapter for each device, by data sheets. A paper gives number and kind of devices and at
most the names of links. What is nominal or assumed beyond that is said in the notes of each file's source.

Of nccl-tests curves are read from ``sendrecv_perf``, ``all_reduce_perf`` and the like.

Both forms are read: the text on stdout, of which one file may hold several runs, and the JSON of ``-J``. Times are
those out of place, in place where there are no others. Sizes are as nccl-tests states them: of all-gather and
reduce-scatter the whole array.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from pipeplan.catalog import names, read_text
from pipeplan.errors import FileError, UsageError, choose_from
from pipeplan.files import Cluster, MeasuredCurve, parse
from pipeplan.files.cluster import FailureDomain, Operation
from pipeplan.texts import of_json
from pipeplan.units import MAX_NS

CLUSTERS = names("clusters")
"""Every cluster by name: those of a maker, ``cluster-h100`` and the like, and the papers' testbeds."""

TESTBEDS = tuple(name for name in CLUSTERS if not name.startswith("cluster-"))
"""Every testbed by name."""


def named_cluster(name: str, num_devices: int | None = None) -> Cluster:
    """A cluster of the catalog; with ``num_devices`` nodes are left out or added, and the last one may be partly used.

    Raises:
        UsageError: there is none of this name, or the number of devices is not one.
    """
    if name not in CLUSTERS:
        raise UsageError(f"there is no testbed {name!r}; {choose_from(name, CLUSTERS)}")
    cluster = parse(read_text("clusters", name), Cluster, f"{name}.json")
    return cluster if num_devices in (None, cluster.num_devices) else _resized(cluster, num_devices)


def _resized(cluster: Cluster, num_devices: int) -> Cluster:
    """The same nodes and links, but more or fewer of them: levels are cut to the devices and the last one holds all."""
    if num_devices < 1:
        raise UsageError(f"{num_devices} devices are not a cluster; give 1 or more")
    *inner, outermost = cluster.levels
    levels = [level for level in inner if level.group_size < num_devices]
    last = outermost if len(levels) == len(inner) else inner[len(levels)]
    size = levels[-1].group_size if levels else 1
    levels.append(last.model_copy(update={"group_size": -(-num_devices // size) * size}))
    whose = "the paper's" if cluster.name in TESTBEDS else "the catalog's"
    notes = f"{num_devices} devices instead of {whose} {cluster.num_devices}. {cluster.source.notes}"
    resized = cluster.model_copy(
        update={
            "name": f"{cluster.name}-{num_devices}",
            "devices": (cluster.devices[0].model_copy(update={"count": num_devices}),),
            "levels": tuple(levels),
            "source": cluster.source.model_copy(update={"notes": notes}),
        }
    )
    return Cluster.model_validate(resized.model_dump())  # a copy is not validated by itself


# Trees of switches -------------------------------------------------------------------------------------------------


def in_tree(
    cluster: Cluster,
    racks: Sequence[int],
    oversubscription: Sequence[float] = (),
    *,
    rails: bool = False,
    power: int | None = None,
) -> Cluster:
    """A cluster of nodes with their network as a tree of switches, and with what fails together.

    Args:
        cluster: nodes, and one kind of links between them.
        racks: nodes under one switch of each tier, from the nodes up.
        oversubscription: of the uplinks of each tier, what all devices below could send at once over what the uplinks
            carry, as 4 for 4:1; 1 for each by default.
        rails: whether devices in the same place of their nodes share a switch of the first tier.
        power: nodes that share a power supply.

    Raises:
        UsageError: the cluster has other levels, tiers hold no whole switches below or all nodes, or there are not as
            many ratios as tiers.
    """
    if not racks:
        flag = "--oversubscription" if oversubscription else "--rails" if rails else "--power"
        raise UsageError(f"{flag} is of switches above nodes; say with --rack how many nodes each has")
    if len(cluster.levels) != 2:
        raise UsageError(
            f"cluster {cluster.name!r} has {len(cluster.levels)} levels of links, and racks need two, inside nodes and "
            "between them; give more --devices"
        )
    node, network = cluster.levels
    _require_tiers(cluster, racks, node.group_size)
    ratios = [*oversubscription] or [1.0] * len(racks)
    if len(ratios) != len(racks):
        raise UsageError(
            f"--oversubscription has {len(ratios)} ratios, and --rack {len(racks)} tiers of switches with uplinks; "
            "give one for each"
        )
    names = ["rail" if rails else "rack", "pod", *(f"pod{tier}" for tier in range(2, len(racks)))]
    sizes = [nodes * node.group_size for nodes in racks]
    first = network.model_copy(update={"name": names[0], "group_size": sizes[0], "rails": rails})
    whole = -(-network.group_size // sizes[-1]) * sizes[-1]
    above = [
        network.model_copy(
            update={
                "name": name,
                "group_size": size,
                "oversubscription": float(ratio),
                "node_bandwidth_bytes_per_s": None,
            }
        )
        for name, size, ratio in zip([*names[1 : len(racks)], "spine"], [*sizes[1:], whole], ratios, strict=True)
    ]
    domains = [("node", node.group_size), *([] if rails else [("rack", sizes[0])])]
    domains += [] if power is None else [("power", power * node.group_size)]
    tiers = ", ".join(f"{ratio:g}:1 above {nodes} nodes" for nodes, ratio in zip(racks, ratios, strict=True))
    notes = f"{cluster.source.notes} Switches{' of rails' * rails} with uplinks of {tiers}; latencies as without them."
    changed = cluster.model_copy(
        update={
            "levels": (node, first, *above),
            "failure_domains": tuple(
                FailureDomain(name=name, group_size=size) for name, size in sorted(domains, key=lambda each: each[1])
            ),
            "source": cluster.source.model_copy(update={"notes": notes}),
        }
    )
    return Cluster.model_validate(changed.model_dump())


def _require_tiers(cluster: Cluster, racks: Sequence[int], node: int) -> None:
    """Each tier's switches have several of those below, and the last does not have all nodes. Raises UsageError."""
    for below, nodes in zip((1, *racks), racks, strict=False):
        if nodes <= below or nodes % below:
            raise UsageError(
                f"--rack {','.join(map(str, racks))}: {nodes} nodes under a switch are no multiple of "
                f"{f'the {below} under each below it' if below > 1 else 'a node'}; give 2 or more nodes, and each tier "
                "as a larger multiple of the one before"
            )
    if racks[-1] * node >= cluster.num_devices:
        raise UsageError(
            f"--rack {racks[-1]} has {racks[-1] * node} devices under one switch, and the cluster has "
            f"{cluster.num_devices}, so that nothing uses its uplinks; give fewer nodes, or more --devices"
        )


# What nccl-tests printed --------------------------------------------------------------------------------------------

_OPERATIONS: dict[str, Operation] = {
    "sendrecv": "send",
    "alltoall": "all_to_all",
    **{name: name for name in get_args(Operation) if name not in ("send", "all_to_all")},
}
"""Name of a test without ``_perf`` -> operation of a cluster's curve."""

_TEST = re.compile(r"(?<![a-z_])([a-z_]+)_perf\b")  # once per word: long ones would take the square of their length
_RANK = re.compile(r"#\s+Rank\s+\d+\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)")
_DEVICES = re.compile(r"#\s*nThreads?:?\s+(\d{1,9})\s+nGpus:?\s+(\d{1,9})\b")
_MAX_NOTES = 8000
_MAX_MICROSECONDS = MAX_NS / 1000
_HEADER = ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run of one test: ``points`` are pairs of bytes and ns, bytes ascending."""

    operation: Operation
    num_devices: int
    num_hosts: int
    points: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _NcclRun:
    """A run while it is read. ``ranks`` are pairs of group and host; ``rows`` of bytes and microseconds."""

    test: str
    where: str
    per_process: int = 1
    ranks: list[tuple[str, str]] = field(default_factory=list)
    rows: list[tuple[int, float]] = field(default_factory=list)

    def add(self, place: str, size: Any, time: Any, wrong: Any) -> None:
        """Take a row: bytes, microseconds, wrong values (None if not counted). ``place`` is for errors."""
        try:
            bytes_, microseconds, num_wrong = int(size), float(time), float(wrong or 0)
        except (TypeError, ValueError, OverflowError):
            raise FileError(
                f"{self.where}: {place}: expected bytes, a time in us and wrong values, "
                f"got {size!r}, {time!r}, {wrong!r}"
            ) from None
        if bytes_ < 0 or not 0 <= microseconds < _MAX_MICROSECONDS:
            raise FileError(f"{self.where}: {place}: {bytes_} bytes in {microseconds} us cannot be")
        if num_wrong:
            raise FileError(f"{self.where}: {place}: nccl-tests found {wrong} wrong values; measure again")
        self.rows.append((bytes_, microseconds))

    def finished(self, num_devices: int) -> MeasuredRun:
        """The run, where a size occurs several times with the median of its times."""
        times: dict[int, list[float]] = {}
        for size, microseconds in self.rows:
            times.setdefault(size, []).append(microseconds)
        points = [(size, max(1, round(statistics.median(times[size]) * 1000))) for size in sorted(times)]
        hosts = {host for _, host in self.ranks}
        return MeasuredRun(_operation(self.test, self.where), num_devices, max(1, len(hosts)), tuple(points))


def parse_nccl_tests(text: str, where: str) -> tuple[MeasuredRun, ...]:
    """The runs in the output of nccl-tests, text or JSON.

    Old versions do not say in their text which test ran; the name of the file ``where`` then must, such as
    ``all_reduce_perf.txt``.

    Raises:
        FileError: nothing was measured, a line makes no sense, a test found wrong values or has no counterpart.
    """
    runs = _parse_json(text, where) if text.lstrip().startswith("{") else _parse_text(text, where)
    if not runs:
        raise FileError(f"{where}: no measurement of nccl-tests in it; give what sendrecv_perf or the like printed")
    return runs


def _operation(test: str, where: str) -> Operation:
    if not test:
        raise FileError(f"{where}: does not say which test ran; name the file after it, as all_reduce_perf.txt")
    if test not in _OPERATIONS:
        known = ", ".join(f"{name}_perf" for name in _OPERATIONS)
        raise FileError(f"{where}: {test}_perf has no curve in a cluster; give one of {known}")
    return _OPERATIONS[test]


# Text -------------------------------------------------------------------------------------------------------------


def _parse_text(text: str, where: str) -> tuple[MeasuredRun, ...]:
    named = _TEST.search(Path(where).name)
    test, runs, header = named.group(1) if named else "", [], _HEADER
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.lstrip("# ").split()
        if found := _DEVICES.match(line):
            runs.append(_NcclRun(test, where, int(found.group(1)) * int(found.group(2))))
        elif found := _RANK.match(line):
            _last(runs, test, where).ranks.append((found.group(1) or "0", found.group(2)))
        elif words[:2] == ["size", "count"]:
            header = _require_times(words, where)
        elif words and words[0].isdecimal() and not line.startswith("#"):
            _add_line(_last(runs, test, where), f"line {number}", words, header)
        elif found := _TEST.search(line):
            test = found.group(1)
    return tuple(run.finished(_ranks_of_first_group(run) or run.per_process) for run in runs if run.rows)


def _last(runs: list[_NcclRun], test: str, where: str) -> _NcclRun:
    """The run being read; a new one if the text begins without a run's head."""
    if not runs:
        runs.append(_NcclRun(test, where))
    return runs[-1]


def _require_times(header: list[str], where: str) -> list[str]:
    if "time" not in header:
        raise FileError(f"{where}: has no column 'time'; run nccl-tests without -C, which reports the processor's time")
    return header


def _add_line(run: _NcclRun, place: str, words: Sequence[str], header: Sequence[str]) -> None:
    """Take a line of the table. Where old versions have no ``#wrong`` they have a rounding error, which is no harm."""
    if len(words) < len(header):
        raise FileError(f"{run.where}: {place}: has {len(words)} columns, the table's head has {len(header)}")
    row = dict(zip(reversed(header), reversed(words[: len(header)]), strict=True))  # the first of two columns wins
    wrong = row.get("#wrong", "N/A")
    run.add(place, row["size"], row["time"], None if wrong == "N/A" else wrong)


def _ranks_of_first_group(run: _NcclRun) -> int:
    """Ranks that communicate with rank 0: ``NCCL_TESTS_SPLIT`` runs several groups at once."""
    return sum(group == run.ranks[0][0] for group, _ in run.ranks)


# JSON -------------------------------------------------------------------------------------------------------------


def _parse_json(text: str, where: str) -> tuple[MeasuredRun, ...]:
    """The one run of a JSON file; its ``devices`` list one rank of each process."""
    try:
        data = of_json(text)
        named = _TEST.search(Path(str(data["args"][0])).name)
        config = data["config"]
        run = _NcclRun(named.group(1) if named else "", where, int(config["nthreads"]) * int(config["ngpus"]))
        run.ranks = [(str(rank.get("group", 0)), str(rank["hostname"])) for rank in config["devices"]]
        for index, row in enumerate(data["results"]):
            body = row.get("out_of_place") or row["in_place"]
            run.add(f"results[{index}]", row["size"], body["time"], body.get("nwrong"))
    except ValueError as error:
        raise FileError(f"{where}: not readable as JSON of nccl-tests: {error}") from None
    except (AttributeError, IndexError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise FileError(f"{where}: not the JSON of nccl-tests: {type(error).__name__}: {error}") from None
    return (run.finished(run.per_process * max(1, _ranks_of_first_group(run))),) if run.rows else ()


# Into the cluster -------------------------------------------------------------------------------------------------


def with_runs(cluster: Cluster, runs: Iterable[MeasuredRun], level: str | None = None, origin: str = "") -> Cluster:
    """The cluster with a measured curve for each run, in place of a curve of the same operation, level and devices.

    Args:
        cluster: what was measured.
        runs: the measurements.
        level: name of the level they are of; without it the innermost level that holds the run's devices, if they
            are on one host or there is one level only.
        origin: where the runs came from, for the notes.

    Raises:
        UsageError: the level is not one of the cluster's or cannot be inferred.
    """
    curves = {(curve.operation, curve.level, curve.num_devices): curve for curve in cluster.measured}
    for run in runs:
        curve = _curve(run, _level_of(cluster, run, level))
        curves[curve.operation, curve.level, curve.num_devices] = curve
    note = f"{cluster.source.notes} Measured with nccl-tests: {origin}.".strip()
    source = cluster.source.model_copy(update={"notes": note} if origin and len(note) <= _MAX_NOTES else {})
    return cluster.model_copy(update={"measured": tuple(curves.values()), "source": source})


def _curve(run: MeasuredRun, level: str) -> MeasuredCurve:
    try:
        return MeasuredCurve(operation=run.operation, level=level, num_devices=run.num_devices, points=run.points)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(
            f"{run.operation} of {run.num_devices} devices does not fit a cluster: {first['msg']}"
        ) from None


def _level_of(cluster: Cluster, run: MeasuredRun, asked: str | None) -> str:
    names = [level.name for level in cluster.levels]
    if asked is not None or not names:
        if asked not in names:
            raise UsageError(f"level {asked!r} is not one of cluster {cluster.name!r}, which has {names or 'none'}")
        return asked
    holding = [level.name for level in cluster.levels if level.group_size >= run.num_devices]
    if not holding:
        raise UsageError(
            f"{run.operation} was measured on {run.num_devices} devices, but no level of cluster {cluster.name!r} "
            f"joins more than {cluster.levels[-1].group_size}"
        )
    if run.num_hosts > 1 and len(names) > 1:
        raise UsageError(
            f"{run.operation} was measured on {run.num_hosts} hosts; say with --level which of {names} that is"
        )
    return holding[0]
