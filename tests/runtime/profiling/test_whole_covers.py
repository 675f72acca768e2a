"""Whole models group by group as covers have them: run, compared with eager torch, and timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeplan.errors import ExecutionError
from pipeplan.kernels.backend import known_backends
from pipeplan.runtime.backends.building import GroupBuilder
from pipeplan.runtime.models.zoo import zoo_model
from pipeplan.runtime.profiling.groups import GroupBenches
from pipeplan.runtime.profiling.whole_covers import WholeCovers


def wrong(name: str, module: Any, inputs: Any, training: bool) -> Any:
    return lambda *taken: module(*taken).flip(-1) * 2


class Crooked(torch.autograd.Function):
    """Numbers as they are, and twice their gradient."""

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def crooked(name: str, module: Any, inputs: Any, training: bool) -> Any:
    return lambda *taken: Crooked.apply(module(*taken))


def rough(name: str, module: Any, inputs: Any, training: bool) -> Any:
    return lambda *taken: module(*taken) * 1.02


@pytest.mark.parametrize("training", [False, True])
def test_covers_run_as_eager_torch_does(training: bool) -> None:
    known = known_backends()
    names = ("eager", "attention-math", "onednn-off")
    builders = {name: GroupBuilder.of(name, known[name].module) for name in names}
    for build in (wrong, crooked, rough):
        module = SimpleNamespace(build=build)
        builders[build.__name__] = GroupBuilder(build.__name__, module)  # type: ignore[arg-type]  # as a module
    how: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "seed": 0, "repeats": 1, "warmup": 0}
    tolerances = {**dict.fromkeys(builders, 1e-4), "rough": 0.1}
    model = zoo_model("gpt2-tiny", sequence=16)
    benches = GroupBenches(model, training=training, builders=builders, tolerances=tolerances, **how)
    benches.described(2)
    covers = WholeCovers(benches, 2, repeats=1)
    ids = benches.order
    eager = tuple(((id_,), "eager") for id_ in ids)
    assert covers.measure(eager) > 0
    assert covers.measure([(ids, "onednn-off")]) > 0
    assert covers.measure([(ids[:1], "eager"), (ids[1:2], "attention-math"), (ids[2:5], "eager"), *eager[5:]]) > 0
    built = len(covers._built)
    covers.measure(eager)
    assert len(covers._built) == built
    with pytest.raises(ExecutionError, match="off eager's"):
        covers.measure([*eager[:2], (ids[2:3], "wrong"), *eager[3:]])
    backwards = [*eager[:2], (ids[2:3], "crooked"), *eager[3:]]
    if training:
        with pytest.raises(ExecutionError, match="off eager's"):
            covers.measure(backwards)
    else:
        assert covers.measure(backwards) > 0
    assert covers.off_eager(eager) == 0
    assert covers.off_eager([*eager[:-1], (ids[-1:], "rough")]) == pytest.approx(0.02, rel=0.01)
    assert covers.measure([*eager[:-1], (ids[-1:], "rough")]) > 0  # a backend's tolerance is the run's
    assert benches.training is training
    assert benches.wired(ids).module.whole
    assert not benches.wired(ids[1:]).module.whole


@pytest.mark.parametrize("training", [False, True])
def test_groups_are_timed_within_runs(training: bool) -> None:
    """As many as the cover has, forward and in training backward of each; gradients are those of one whole backward."""
    known = known_backends()
    names = ("eager", "onednn-off")
    how: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "seed": 0, "repeats": 1, "warmup": 0}
    benches = GroupBenches(
        zoo_model("gpt2-tiny", sequence=16),
        training=training,
        builders={name: GroupBuilder.of(name, known[name].module) for name in names},
        tolerances=dict.fromkeys(names, 1e-4),
        **how,
    )
    benches.described(2)
    covers = WholeCovers(benches, 2, repeats=1)
    ids = benches.order
    for cover in (tuple(((id_,), "eager") for id_ in ids), ((ids[:3], "onednn-off"), (ids[3:], "eager"))):
        times = covers.times(cover)
        assert len(times) == len(cover)
        assert all(forward > 0 for forward, _ in times)
        assert all((backward > 0) == training for _, backward in times)
    parameters = [own for ids_ in (ids[:3], ids[3:]) for own in benches.wired(ids_).module.parameters()]
    assert all(own.grad is None for own in parameters)
    if training:
        found = []
        for cut in (cover, ((ids, "eager"),)):
            steps, modules = covers._steps([covers._way(*each) for each in cut])
            covers._run(steps)
            found.append([own.grad for module in modules for own in module.parameters()])
            for module in modules:
                module.zero_grad()
        assert len(found[0]) == len(found[1]) > 0
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


def test_timed_runs_add_to_the_gradients_of_the_run_before() -> None:
    """But for the first, which is not counted; that which is compared with eager torch begins with none, too."""
    had = list[bool]()

    def watched(name: str, module: Any, inputs: Any, training: bool) -> Any:
        def call(*taken: torch.Tensor) -> object:
            had.append(any(own.grad is not None for own in module.parameters()))
            return module(*taken)

        return call

    how: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "seed": 0, "repeats": 2, "warmup": 0}
    module = SimpleNamespace(build=watched)
    builders = {
        "eager": GroupBuilder.of("eager", known_backends()["eager"].module),
        "watched": GroupBuilder("watched", module),  # type: ignore[arg-type]  # as a module
    }
    benches = GroupBenches(
        zoo_model("gpt2-tiny", sequence=16),
        training=True,
        builders=builders,
        tolerances=dict.fromkeys(builders, 1e-4),
        **how,
    )
    benches.described(2)
    covers = WholeCovers(benches, 2, repeats=2)
    cover = [((id_,), "watched" if id_ == benches.order[1] else "eager") for id_ in benches.order]
    covers._way(*cover[1])
    for measure in (covers.times, covers.measure):
        had.clear()
        measure(cover)
        assert had[:2] == [False, False]
        assert len(had) >= 4
        assert all(had[2:])
