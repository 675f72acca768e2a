"""Covers of five networks by kernel backends, measured as wholes beside every backend and every framework alone.

    python benchmarks/kernel_table.py --state STATE                  # all of it; may be interrupted, goes on from STATE
    python benchmarks/kernel_table.py --state STATE --minutes 9      # begins nothing new after that long
    python benchmarks/kernel_table.py --state STATE --print          # the tables of docs/benchmarks/kernels.md

It needs a quiet machine, and the extras onnxruntime and openvino. For each network, number of threads and number of
samples ``pipeplan profile --backends`` measures groups (step ``profile``), and step ``log`` chooses a cover from what
that wrote, and gives the same command again. Then one process looks for the cheapest cover of all backends, of fewer,
and of all but TorchScript, each by runs of the whole network as ``profile`` does, and runs the network by these, by
each backend that can run all of it, and by each framework as it comes (step ``whole``): in rounds, one after the other,
so that what disturbs the machine for seconds disturbs all of them. Step ``graph`` has the graph level from the same
covers on, and ``level`` from those without any group of the whole network, for where that is the best cover there is
nothing left to evolve.

All ways to run a network are in memory at once. ``--not-again inductor`` leaves out covers of that backend alone; the
tables then have what such a cover took in the profile's runs, with a star.

A framework as it comes is the network's own module in eager torch, compiled by ``torch.compile``, exported to ONNX
Runtime, or read by OpenVINO, in float32, called with tensors and giving tensors. Outputs are compared with eager
torch's before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import geometric_mean, median
from types import SimpleNamespace
from typing import Any

from tables import machine, markdown, note

MODELS = ("dcgan", "bert-base", "resnext50", "resnet50-3d", "nasnet-a")
BACKENDS = (
    *("onednn-off", "channels-last", "attention-flash", "attention-math", "inductor", "onnxruntime", "openvino"),
    "torchscript",
)
"""In the order in which the table of fewer backends adds them to eager torch."""
FRAMEWORKS = ("eager", "inductor", "onnxruntime", "openvino")
SATURATED = 5
"""Generations without a better cover after which a graph level ends."""
LIBRARIES = ("inductor", "onnxruntime", "openvino", "torchscript")
"""Backends that take a whole graph."""
STEPS = ("profile", "log", "whole", "graph", "level")


class TableState:
    """What is known so far, in a folder: profiles, and one file of figures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "table.json"
        self.known: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def profile(self, *of: object) -> Path:
        """Where the profile of a network, with so many threads and samples, is."""
        return self.folder / f"{'.'.join(map(str, of))}.json"

    def put(self, key: str, figures: Mapping[str, Any]) -> None:
        """Keep what a step found."""
        self.known[key] = {**figures, "machine": machine()}
        self._path.write_text(json.dumps(self.known, indent=1))


# Steps ------------------------------------------------------------------------------------------------------------


def profile_step(state: TableState, given: argparse.Namespace, of: tuple[str, int, int], seconds: float) -> None:
    """Measure groups for as long as there is time, going on where an earlier call ended."""
    key = "/".join(map(str, ("profile", *of)))
    nothing = {"seconds": 0.0, "compile_s": 0.0, "backends_s": 0.0, "whole_s": 0.0, "commands": 0, "done": False}
    before = state.known.get(key, nothing)
    command = measuring(state, given, of, seconds, state.profile(*of))
    begun = time.monotonic()
    ran = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)}: {ran.stderr}")
    said = re.search(r"backends took ([\d.]+) ?(\S+) to compile, of ([\d.]+) s", ran.stderr)
    unit = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
    whole = re.search(r"runs of the whole model took ([\d.]+) s", ran.stderr)
    left = re.search(r"--measure-limit was over; not measured: (.*)", ran.stderr)
    found = {
        "seconds": before["seconds"] + time.monotonic() - begun,
        "compile_s": before["compile_s"] + (float(said[1]) * unit[said[2]] if said else 0.0),
        "backends_s": before["backends_s"] + (float(said[3]) if said else 0.0),
        "whole_s": before["whole_s"] + (float(whole[1]) if whole else 0.0),
        "commands": before["commands"] + 1,
        "done": left is None,
        "left": left[1] if left else "",
    }
    state.put(key, found)


def verb(state: TableState, given: argparse.Namespace, *arguments: str) -> list[str]:
    """A command of pipeplan, by the clock that is asked for."""
    return [sys.executable, __file__, "--state", str(state.folder), "--clock", given.clock, "--pipeplan", *arguments]


def measuring(
    state: TableState, given: argparse.Namespace, of: tuple[str, int, int], seconds: float, path: Path
) -> list[str]:
    """The command that measures groups of a network."""
    model, threads, batch = of
    return verb(
        state,
        given,
        *("profile", model, "--inference", "--granularity", "operator"),
        *("--batch", str(batch), "--threads", str(threads)),
        *("--backends", ",".join(given.backends), "--repeats", str(given.repeats), "--warmup", "1"),
        *("--measure-limit", f"{max(1, int(seconds))}s", "-o", str(path)),
    )


def log_step(state: TableState, given: argparse.Namespace, of: tuple[str, int, int]) -> None:
    """What a cover takes once there is a log, and the command that measured where nothing is left to measure."""
    again = state.folder / "again.json"
    shutil.copy(state.profile(*of), again)
    took = {}
    ways = {
        "choosing_s": verb(state, given, "kernels", str(again), "--json"),
        "again_s": measuring(state, given, of, 1, again),
    }
    for name, command in ways.items():
        begun = time.monotonic()
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        took[name] = time.monotonic() - begun
    state.put("/".join(map(str, ("log", *of))), {**took, "seconds": sum(took.values())})


def child_step(state: TableState, given: argparse.Namespace, what: str, of: tuple[str, int, int]) -> None:
    """A step in a process of its own, whose figures come back in a file."""
    key, path = "/".join(map(str, (what, *of))), state.folder / "child.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--state", str(state.folder), "--child", key]
    command += ["--graph-seconds", str(given.graph_seconds), "--cover-seconds", str(given.cover_seconds)]
    command += ["--clock", given.clock, "--rounds", str(given.rounds), "--way-seconds", str(given.way_seconds)]
    command += ["--not-again", ",".join(given.not_again)] if given.not_again else []
    begun = time.monotonic()
    ran = subprocess.run(command, check=False)
    if ran.returncode or not path.exists():
        note(f"{key}: the process ended with {ran.returncode}")
        state.put(key, {"failed": ran.returncode})
        return
    state.put(key, {**json.loads(path.read_text()), "seconds": time.monotonic() - begun})


# In a process of its own ------------------------------------------------------------------------------------------


def with_backends(profile: Any, names: Collection[str]) -> Any:
    """The profile with rows and whole runs of eager torch and of some backends."""
    kept = {"eager", *names}

    def rows(costs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(row for row in costs if row.backend in kept)

    blocks = tuple(each.model_copy(update={"costs": rows(each.costs)}) for each in profile.blocks)
    fusions = ((each, rows(each.costs)) for each in profile.fusions)
    own = tuple(each.model_copy(update={"costs": costs}) for each, costs in fusions if costs)
    runs = tuple(run for run in profile.whole_runs if run.backends <= kept)
    return profile.model_copy(update={"blocks": blocks, "fusions": own, "whole_runs": runs})


@dataclass
class CoverWays:
    """Covers of a network, by name: what was said that each takes, and what is known of the cheapest of all.

    Each is looked for as ``profile --backends`` of its backends would, by runs of the whole network, for ``seconds``;
    what ran for one of them is known to the next.
    """

    profile: Any
    batch: int
    covers: Any
    graph: Any
    seconds: float
    told: list[str] = field(default_factory=list)
    ways: dict[str, tuple[list[tuple[tuple[str, ...], str]], int]] = field(default_factory=dict)
    shares: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)

    def settled(self, names: Collection[str]) -> Any:
        """The profile of some backends with the runs that were to be done."""
        from pipeplan.kernels.whole_runs import WholeRuns

        begun = time.monotonic()
        runs = WholeRuns(
            self.graph,
            self.batch,
            lambda groups, size: self.covers.times(groups),
            tell=self.told.append,
            left=lambda: self.seconds - (time.monotonic() - begun),
        )
        found = runs.settled(with_backends(self.profile, names))
        known = self.profile.whole_runs
        more = tuple(run for run in found.whole_runs if run not in known)
        self.profile = self.profile.model_copy(update={"whole_runs": (*known, *more)})
        return found

    def add(self, name: str, backends: Collection[str]) -> Any:
        """The cheapest cover of some backends."""
        from pipeplan import _api

        choice = _api.choose_kernels(self.settled(backends), self.batch, 30.0)
        groups = groups_of(choice)
        self.ways[name] = groups, choice.cover.total_ns
        self.shares[name] = {
            "operators": Counter(backend for blocks, backend in groups for _ in blocks),
            "groups": Counter(backend for _, backend in groups),
        }
        return choice


def groups_of(choice: Any, cover: Any = None) -> list[tuple[tuple[str, ...], str]]:
    return [(match.blocks, match.backend) for match in (cover or choice.cover).as_runs(choice.graph)]


def as_measured_alone(choice: Any) -> int:
    """What the groups of a cover took alone, one by one, before there were runs, with changes of backend, in ns."""
    rows = {((block.id,), row.backend): row for block in choice.profile.blocks for row in block.costs}
    rows |= {(fusion.blocks, row.backend): row for fusion in choice.profile.fusions for row in fusion.costs}
    own = [rows[match.blocks, match.backend] for match in choice.cover.matches]
    alone: list[int] = [(row.alone or {}).get("forward_ns", row.forward_ns) for row in own]
    changes: int = choice.cover.num_changes * choice.profile.backend_change_ns
    return changes + sum(alone)


def proofs(choice: Any, matches: Sequence[Any]) -> dict[str, Any]:
    """Algorithm 1 and CP-SAT on some of the rows of a profile, the latter not knowing the former's answer."""
    from pipeplan.kernels.covers import algorithm_1
    from pipeplan.schedule.cpsat.cover import exact_cover
    from pipeplan.schedule.cpsat.solver import Budget

    change = choice.profile.backend_change_ns
    begun = time.process_time()
    first = algorithm_1(choice.graph, matches, change)
    quick = time.process_time() - begun
    begun = time.monotonic()
    best, bound = exact_cover(choice.graph, matches, change, Budget(20.0))
    return {
        "algorithm_1_ns": first.total_ns,
        "algorithm_1_s": quick,
        "optimum_ns": best.total_ns,
        "proved": best.proved,
        "bound_ns": bound,
        "proof_s": time.monotonic() - begun,
        "operators": len(choice.graph),
        "matches": len(matches),
        "groups": len(best.matches),
        "change_ns": change,
    }


def chosen_ways(found: CoverWays) -> dict[str, Any]:
    """Covers by name into what is ``found``, and what is known of the cheapest."""
    from pipeplan import _api
    from pipeplan.errors import InfeasibleError
    from pipeplan.kernels.covers import algorithm_1
    from pipeplan.kernels.whole_runs import best_run, cover_of

    single = _api.choose_kernels(found.profile, found.batch, 30.0).single
    known = [name for name in BACKENDS if name in single]
    for number, name in enumerate(known):
        found.add(f"up to {name}", known[: number + 1])
    found.add("without torchscript", [each for each in known if each != "torchscript"])
    choice = found.add("cover", known)
    for name in single:
        own = [match for match in choice.matches if match.backend == name]
        try:
            alone = algorithm_1(choice.graph, own)
        except InfeasibleError:
            continue
        run = best_run(found.profile, found.batch, [(match.blocks, match.backend) for match in own])
        if run is not None:
            alone = cover_of(choice.graph, run, 0)
        found.ways[f"alone: {name}"] = groups_of(choice, alone), alone.total_ns
    parts = [match for match in choice.matches if len(match.blocks) < len(choice.graph)]
    shown = {**proofs(choice, choice.matches), "parts": proofs(choice, parts)}
    return {**shown, "alone_ns": as_measured_alone(choice), "shares": found.shares, "told": found.told}


def frameworks(
    model: str, batch: int, off: dict[str, float], refused: dict[str, str]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What runs the network as each framework has it, compared with eager torch: how far ``off`` it is, or why not."""
    import torch

    from pipeplan.runtime.backends import eager, inductor, onnxruntime, openvino
    from pipeplan.runtime.backends.comparing import distance, require_same
    from pipeplan.runtime.models.networks import network

    module, example = network(model)
    (sample,) = example.values()
    sample = sample[:1].expand(batch, *sample.shape[1:]).contiguous()
    with torch.no_grad():
        wanted = module(sample)
    for name, build in zip(FRAMEWORKS, (eager, inductor, onnxruntime, openvino), strict=True):
        try:
            built = build.build(name, copy.deepcopy(module).eval(), (sample,), False)
            with torch.no_grad():
                made = built.call(sample)
            require_same([wanted], [made], 1e-3, torch.float32)
        except Exception as error:  # a framework that cannot run a network is what the table says of it
            refused[f"as it comes: {name}"] = f"{type(error).__name__}: {error}"[:300]
            continue
        off[f"as it comes: {name}"] = distance(wanted, made)
        yield f"as it comes: {name}", partial(built.call, sample)


def timed_rounds(ways: Mapping[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, list[list[int]]]:
    """[way][round][run] ns, all ways one after the other in each round; the first run of a turn is not counted."""
    import torch

    from pipeplan.runtime.profiling.instruments import steady, timed

    device, found = torch.device("cpu"), {name: list[list[int]]() for name in ways}
    with torch.no_grad(), steady(device):
        once = {name: min(timed(way, device)[1] for _ in range(2)) / 1e9 for name, way in ways.items()}
        for _ in range(rounds):
            for name, way in ways.items():
                if once[name] < 1:
                    way()
                runs = max(1, min(30, math.ceil(seconds / rounds / once[name])))
                found[name].append([timed(way, device)[1] for _ in range(runs)])
    return found


def group_benches(profile: Any, model: str, batch: int) -> tuple[Any, Any, Any]:
    """The model, what builds and runs its groups, and its operators."""
    from pipeplan import _api
    from pipeplan.kernels.backend import known_backends
    from pipeplan.kernels.operators import GraphOperator, OperatorDag

    found, _ = _api.load_where_even(model, sequence=None, grain="operator", shared=(), shards=(1,), meta=False)
    known = known_backends()
    benches = _api._group_benches(found, profile, known, "cpu", seed=0, repeats=5, warmup=1)
    blocks = benches.described(batch)
    return found, benches, OperatorDag(GraphOperator(b.id, b.kind, b.inputs, b.attributes, (b.alike,)) for b in blocks)


def whole_child(profile: Any, model: str, threads: int, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    """Everything that runs a whole network, in rounds."""
    from pipeplan.errors import ExecutionError
    from pipeplan.runtime.profiling.build_profile import on_threads
    from pipeplan.runtime.profiling.whole_covers import WholeCovers

    off, refused = dict[str, float](), dict[str, str]()
    with on_threads(threads):
        runs: dict[str, Callable[[], object]] = dict(frameworks(model, batch, off, refused))
        _, benches, graph = group_benches(profile, model, batch)
        covers, same = WholeCovers(benches, batch), dict[str, str]()
        found = CoverWays(profile, batch, covers, graph, given.cover_seconds)
        facts = chosen_ways(found)
        of: dict[str, str] = {}
        for name, (groups, _) in found.ways.items():
            key = json.dumps(groups)
            same[name] = of.setdefault(key, name)
            if same[name] == name and not {backend for _, backend in groups} <= set(given.not_again):
                try:
                    runs[name], off[name] = covers.runner(groups), covers.off_eager(groups)
                except ExecutionError as error:
                    refused[name] = str(error)[:300]
        times = timed_rounds(runs, given.rounds, given.way_seconds)
    predicted = {name: ns for name, (_, ns) in found.ways.items()}
    said = {"predicted_ns": predicted, "same": same, "off": off, "refused": refused}
    return {**facts, **said, "times_ns": times, "clock": given.clock}


def without_whole(profile: Any) -> Any:
    """A profile without groups of all blocks, and without whole runs, most of which are of these."""
    kept = tuple(each for each in profile.fusions if len(each.blocks) < len(profile.blocks))
    return profile.model_copy(update={"fusions": kept, "whole_runs": ()})


def graph_child(profile: Any, model: str, threads: int, batch: int, seconds: float, own: Any) -> dict[str, Any]:
    """The graph level with its curve, from the cheapest cover of the ``own`` rows on.

    Its library is the quickest of the whole profile that has rows there; if none has, there is nothing to begin from.
    """
    from pipeplan import _api
    from pipeplan.kernels.evolution import open_operators

    single, choice = _api.choose_kernels(profile, batch, 30.0).single, _api.choose_kernels(own, batch, 30.0)
    libraries = [name for name in single if name in LIBRARIES and name in choice.single]
    if not libraries:
        return {"failed": "no library has rows to begin from"}
    library = min(libraries, key=lambda name: single[name] or math.inf)
    found, _ = _api.load_where_even(model, sequence=None, grain="operator", shared=(), shards=(1,), meta=False)
    asked = _api.EvolutionAsked(library=library, threads=threads, limit_s=seconds)
    begun, at = time.monotonic(), list[float]()
    level = _api.evolve_kernels(choice, found, asked, lambda each: at.append(time.monotonic() - begun))
    figures = {name: each for name, each in level.figures().items() if name != "cover"}
    figures["groups"] = Counter(each["backend"] for each in level.figures()["cover"])
    cover = choice.cover.as_runs(choice.graph)
    return {**figures, "at_s": at, "open": len(open_operators(choice.graph, cover, level.library))}


def on_processor_time() -> None:
    """Take processor time for wall-clock time, in all that is timed here: on a busy machine, with one thread."""
    from pipeplan.runtime.parallel import device

    setattr(device, "time", SimpleNamespace(monotonic_ns=time.process_time_ns))  # noqa: B010  # all that it has of time


def run_child(state: TableState, key: str, given: argparse.Namespace) -> None:
    from pipeplan import _api

    what, model, threads, batch = key.split("/")
    profile = _api.read_profile(str(state.profile(model, threads, batch)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if what == "whole":
            found = whole_child(profile, model, int(threads), int(batch), given)
        else:
            own = without_whole(profile) if what == "level" else profile
            found = graph_child(profile, model, int(threads), int(batch), given.graph_seconds, own)
    (state.folder / "child.json").write_text(json.dumps(found))


# Tables -----------------------------------------------------------------------------------------------------------


def ms(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.2f}"


def measured(cell: Mapping[str, Any], name: str) -> float | None:
    """The median of all runs; of processor time on a busy machine that of the least in each round."""
    rounds = cell["times_ns"].get(cell["same"].get(name, name))
    if not rounds:
        return None
    return float(median(map(min, rounds) if cell["clock"] == "processor" else chain.from_iterable(rounds)))


def best_of(cell: Mapping[str, Any], start: str) -> tuple[str, float] | None:
    found = [
        (name.removeprefix(start), ns)
        for name in (*cell["times_ns"], *cell["same"])
        if name.startswith(start) and (ns := measured(cell, name)) is not None
    ]
    return min(found, key=lambda each: each[1], default=None)


def cells_of(state: TableState) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Those in which the cover ran."""
    found = {}
    for key, cell in state.known.items():
        what, model, *rest = key.split("/")
        if what == "whole" and "failed" not in cell and measured(cell, "cover") is not None:
            found[model, int(rest[0]), int(rest[1])] = cell
    return dict(sorted(found.items(), key=lambda each: (MODELS.index(each[0][0]), each[0][1:])))


def shares_text(cell: Mapping[str, Any], name: str, of: str) -> str:
    own = cell["shares"][name][of]
    return ", ".join(f"{each} {count / sum(own.values()):.0%}" for each, count in Counter(own).most_common())


def failures(state: TableState) -> Iterator[str]:
    """Steps that failed, and what was refused in those that did not."""
    for key, cell in state.known.items():
        if "failed" in cell:
            yield f"* {key}: the process ended with {cell['failed']}"
        for name, why in cell.get("refused", {}).items():
            yield f"* {key}: {name}: {why}"
        for text in dict.fromkeys(cell.get("told", ())):
            yield f"* {key}: {text}"
        what, *of = key.split("/")
        if what == "profile" and (path := state.profile(*of)).exists():
            profile = json.loads(path.read_text())
            for each in profile.get("refusals", ()):
                if len(each["blocks"]) == len(profile["blocks"]):
                    yield f"* {key}: the whole by {each['backend']}: {each['reason'][:200]}"


def tables(state: TableState) -> Iterator[str]:
    """All that the page has."""
    cells = cells_of(state)
    yield "Whole networks, ms (median)\n"
    yield markdown(*whole_table(cells))
    for name in ("cover", "without torchscript"):
        for words, models in (("all", MODELS), *((model, (model,)) for model in MODELS)):
            own = [cell for (model, *_), cell in cells.items() if model in models]
            pairs = [(best_of(cell, "as it comes: "), measured(cell, name)) for cell in own]
            ratios = [best[1] / ns for best, ns in pairs if best is not None and ns is not None]
            if ratios:
                mean = f"{geometric_mean(ratios):.2f} over {len(ratios)} cells"
                yield f"\ngeometric mean of best framework / {name}, {words}: {mean}"
    yield "\nEach backend alone, ms (median)\n"
    yield markdown(*alone_table(cells))
    yield "\nPredicted beside measured, groups by backend, and the proof\n"
    yield markdown(*predicted_table(cells))
    yield "\nBackends one at a time: measured ms (predicted)\n"
    yield markdown(*added_table(cells))
    yield "\nMeasuring\n"
    yield markdown(*measuring_table(state))
    for step, words in (("graph", "Graph level"), ("level", "Graph level without groups of the whole network")):
        yield f"\n{words}\n"
        yield markdown(*graph_table(state, step))
    yield f"\nall steps together: {sum(cell.get('seconds', 0.0) for cell in state.known.values()) / 60:.0f} min\n"
    yield from failures(state)


def whole_table(cells: Mapping[tuple[str, int, int], Any]) -> tuple[list[str], list[list[str]]]:
    names = ["eager", "inductor", "onnxruntime", "openvino"]
    header = ["network", "threads", "samples", "cover", "best backend alone", "cover / it"]
    header += [f"{name} as it comes" for name in names] + [
        "best framework / cover",
        "without torchscript",
        "/ it",
        "runs",
    ]
    rows = []
    for (model, threads, batch), cell in cells.items():
        own, alone, best = measured(cell, "cover"), best_of(cell, "alone: "), best_of(cell, "as it comes: ")
        without = measured(cell, "without torchscript")
        assert own is not None, "cells of the table are whole"
        assert alone is not None
        assert best is not None
        assert without is not None
        frames = [ms(measured(cell, f"as it comes: {name}")) for name in names]
        first = [model, str(threads), str(batch), ms(own), f"{ms(alone[1])} ({alone[0]})", f"{own / alone[1]:.2f}"]
        rows.append([*first, *frames, f"{best[1] / own:.2f}", ms(without), f"{best[1] / without:.2f}", runs_of(cell)])
    return header, rows


def runs_of(cell: Mapping[str, Any]) -> str:
    """How often the cover ran in how many rounds."""
    rounds = cell["times_ns"][cell["same"].get("cover", "cover")]
    return f"{sum(map(len, rounds))} in {len(rounds)}"


def alone_table(cells: Mapping[tuple[str, int, int], Any]) -> tuple[list[str], list[list[str]]]:
    names = [name for name in ("eager", *BACKENDS) if any(f"alone: {name}" in cell["same"] for cell in cells.values())]
    rows = [
        [model, str(threads), str(batch), *(alone_text(cell, f"alone: {name}") for name in names)]
        for (model, threads, batch), cell in cells.items()
    ]
    return ["network", "threads", "samples", *names], rows


def alone_text(cell: Mapping[str, Any], name: str) -> str:
    """What a way took; with a star what it took in the profile's runs, where it did not run again."""
    own, said = measured(cell, name), cell["predicted_ns"].get(name)
    return f"{ms(said)}*" if own is None and said is not None else ms(own)


def predicted_table(cells: Mapping[tuple[str, int, int], Any]) -> tuple[list[str], list[list[str]]]:
    header = ["network", "threads", "samples", "predicted", "measured", "off", "groups alone add up to", "off"]
    header += ["off eager at most", "groups", "groups by backend", "operators by backend", "without torchscript"]
    header += ["a change, us", "Algorithm 1 over CP-SAT", "its s", "proof s"]
    header += [f"{each} without the whole" for each in ("rows", "groups", "Algorithm 1 over CP-SAT")]
    rows = []
    for (model, threads, batch), cell in cells.items():
        said, own, alone = cell["predicted_ns"]["cover"], measured(cell, "cover"), cell["alone_ns"]
        assert own is not None
        parts = cell["parts"]
        row = [model, str(threads), str(batch), ms(said), ms(own), f"{said / own - 1:+.1%}"]
        row += [ms(alone), f"{alone / own - 1:+.1%}", f"{cell['off'][cell['same']['cover']]:.0e}"]
        row += [str(sum(cell["shares"]["cover"]["groups"].values())), shares_text(cell, "cover", "groups")]
        row += [shares_text(cell, "cover", "operators"), shares_text(cell, "without torchscript", "groups")]
        row += [f"{cell['change_ns'] / 1e3:.1f}" if cell["change_ns"] else "-", over_proof(cell)]
        row += [f"{cell['algorithm_1_s']:.2f}", f"{cell['proof_s']:.1f}"]
        rows.append([*row, str(parts["matches"]), str(parts["groups"]), over_proof(parts)])
    return header, rows


def over_proof(found: Mapping[str, Any]) -> str:
    """Algorithm 1's cover over CP-SAT's best."""
    return f"{found['algorithm_1_ns'] / found['optimum_ns'] - 1:.2%}" + ("" if found["proved"] else " (not proved)")


def added_table(cells: Mapping[tuple[str, int, int], Any]) -> tuple[list[str], list[list[str]]]:
    names = [name for name in BACKENDS if any(f"up to {name}" in cell["same"] for cell in cells.values())]
    rows = []
    for (model, threads, batch), cell in cells.items():
        row = [model, str(threads), str(batch)]
        for name in ("alone: eager", *(f"up to {each}" for each in names)):
            own = measured(cell, name)
            said = cell["predicted_ns"].get(name)
            row.append("-" if said is None else f"{ms(own)} ({ms(said)})")
        rows.append(row)
    return ["network", "threads", "samples", "eager", *(f"+ {name}" for name in names)], rows


def measuring_table(state: TableState) -> tuple[list[str], list[list[str]]]:
    header = ["network", "threads", "samples", "s from nothing", "of it groups", "compiling in these"]
    header += ["runs of the whole", "the rest", "s from the log", "the same command again, s", "commands"]
    header += ["groups left out"]
    rows = []
    for key, found in state.known.items():
        what, *of = key.split("/")
        if what == "profile":
            groups, compiling, whole = (
                found[name] / found["seconds"] for name in ("backends_s", "compile_s", "whole_s")
            )
            row = [*of, f"{found['seconds']:.0f}", f"{groups:.0%}", f"{compiling:.0%}", f"{whole:.0%}"]
            row.append(f"{1 - groups - whole:.0%}")
            log = state.known.get("/".join(("log", *of)))
            row += [f"{log['choosing_s']:.1f}", f"{log['again_s']:.0f}"] if log else ["-"] * 2
            rows.append([*row, str(found["commands"]), left_out(found["left"])])
    return header, rows


def left_out(text: str) -> str:
    """How many groups there was no time to measure alone; of them three are named."""
    more = re.search(r"and (\d+) more", text)
    return str(text.count(" at micro-batch size ") + (int(more[1]) if more else 0))


def graph_table(state: TableState, step: str) -> tuple[list[str], list[list[str]]]:
    header = ["network", "threads", "samples", "library", "open operators", "operator level", "graph level", "gain"]
    header += ["covers measured", "refused", "its groups", "ended by", "best by generation (s)"]
    rows = []
    for key, found in state.known.items():
        what, *of = key.split("/")
        if what == step and "failed" not in found:
            curve = found["curve"]
            points = zip(curve, found["at_s"], strict=True)
            line = ", ".join(f"{ms(each['best_ns'])} ({at:.0f})" for each, at in points)
            row = [*of, found["library"], str(found["open"]), ms(found["operator_level_ns"]), ms(found["measured_ns"])]
            row += [f"{found['gain']:.2f}", str(curve[-1]["measured"]), str(found["num_failed"])]
            row.append(", ".join(f"{count} by {name}" for name, count in found.get("groups", {}).items()))
            rows.append([*row, ended(found), line])
    return header, rows


def ended(found: Mapping[str, Any]) -> str:
    """Why a graph level ended."""
    if not found["open"]:
        return "nothing to give"
    bests = [each["best_ns"] for each in found["curve"]]
    return "saturation" if len(bests) > SATURATED and bests[-1 - SATURATED] == bests[-1] else "limit"


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="folder of what is known")
    parser.add_argument("--models", type=words, default=MODELS)
    parser.add_argument("--batches", type=numbers, default=(1, 8))
    parser.add_argument("--threads", type=numbers, default=(1, 2))
    parser.add_argument("--backends", type=words, default=BACKENDS)
    parser.add_argument("--steps", type=words, default=STEPS)
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of a group")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing new after that long")
    parser.add_argument("--profile-minutes", type=float, default=3.5, help="for the groups of a network")
    parser.add_argument("--graph-seconds", type=float, default=30.0, help="for a graph level")
    parser.add_argument("--cover-seconds", type=float, default=8.0, help="for runs of each set of backends")
    parser.add_argument("--again", action="store_true", help="also what is known")
    parser.add_argument("--print", action="store_true", help="the tables of what is known")
    parser.add_argument("--rounds", type=int, default=5, help="in which all ways to run a network take turns")
    parser.add_argument("--way-seconds", type=float, default=2.0, help="for each way in all rounds together")
    parser.add_argument("--not-again", type=words, default=(), help="backends for whose own covers memory is short")
    parser.add_argument(
        "--clock", choices=("wall", "processor"), default="wall", help="processor: with one thread only"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--pipeplan", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    state = TableState(given.state)
    if given.clock == "processor" and (given.child or given.pipeplan):
        on_processor_time()
    if given.pipeplan is not None:
        from pipeplan.cli.main import main as of_pipeplan

        sys.argv = ["pipeplan", *given.pipeplan]
        of_pipeplan()
    elif given.child is not None:
        run_child(state, given.child, given)
    elif given.print:
        print(machine(), "\n", *tables(state), sep="\n")
    else:
        run_steps(state, given)


def run_steps(state: TableState, given: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * given.minutes
    for of in product(given.models, given.threads, given.batches):
        for what in given.steps:
            key = "/".join(map(str, (what, *of)))
            known, left = state.known.get(key, {}), end - time.monotonic()
            if left <= 0:
                note("time is over; the same command goes on")
                return
            if what == "profile":
                left = min(60 * given.profile_minutes - known.get("seconds", 0.0), left)
                if left > 1 and not known.get("done"):
                    note(f"{key}: {left:.0f} s")
                    profile_step(state, given, of, left)
            elif given.again or not known:
                note(key)
                if what == "log":
                    log_step(state, given, of)
                else:
                    child_step(state, given, what, of)


if __name__ == "__main__":
    main()
