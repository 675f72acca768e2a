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
    return lambda *taken: module(*taken) * 2


@pytest.mark.parametrize("training", [False, True])
def test_covers_run_as_eager_torch_does(training: bool) -> None:
    known = known_backends()
    names = ("eager", "attention-math", "onednn-off")
    builders = {name: GroupBuilder.of(name, known[name].module) for name in names}
    builders["wrong"] = GroupBuilder("wrong", SimpleNamespace(build=wrong))  # type: ignore[arg-type]  # as a module
    how: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "seed": 0, "repeats": 1, "warmup": 0}
    tolerances = dict.fromkeys(builders, 1e-4)
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
    assert benches.training is training
