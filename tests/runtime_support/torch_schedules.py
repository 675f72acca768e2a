"""Schedules run by torch's own pipelining: a small decoder, cut as a file of modules says, on four gloo processes."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from pipeplan.files import Modules, parse
from pipeplan.runtime.models.load import load_model
from runtime_support.warm import warm_ranks

RANKS, LAYERS, VOCABULARY, WIDTH, TOKENS = 4, 8, 31, 8, 5


class Layer(nn.Module):
    """Something whose gradients are not all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Modules named as torchtitan's, each of which a stage may lack."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.lm_head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or what the stage before made."""
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.lm_head(x) if self.lm_head is not None else x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over all predictions."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class WithLoss(nn.Module):
    """The whole, as pipeplan takes it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        return loss_of(self.decoder(tokens), targets)


def decoder() -> Decoder:
    """The same parameters each time."""
    torch.manual_seed(3)
    return Decoder().double()


def captured() -> tuple[nn.Module, dict[str, Tensor]]:
    """The decoder with its loss, and example inputs."""
    tokens = torch.arange(2 * TOKENS).reshape(2, TOKENS) % VOCABULARY
    return WithLoss(decoder()), {"tokens": tokens, "targets": tokens.roll(-1, 1)}


MODEL = "runtime_support.torch_schedules:captured"


def only(model: Decoder, names: Collection[str]) -> Decoder:
    """The model without what is not named, as torchtitan cuts one: children, and items of lists of them."""
    model = copy.deepcopy(model)
    for name, child in list(model.named_children()):
        if isinstance(child, nn.ModuleList):
            kept = [layer for number, layer in enumerate(child) if f"{name}.{number}" in names]
            setattr(model, name, nn.ModuleList(kept))
        elif name not in names:
            setattr(model, name, None)
    return model


def losses(folder: Path, cases: Mapping[str, tuple[str, str]], samples: int, profiled: str = "") -> dict[str, float]:
    """{case: the summed loss of one iteration}, of cases of (CSV's path, text of the modules).

    Of the ``profiled`` case each rank leaves what ``torch.profiler`` writes, ``RANK.json``.
    """
    context = multiprocessing.get_context("forkserver")
    with warm_ranks():
        queue = context.Queue()
        arguments = (str(folder), dict(cases), samples, profiled, queue)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in processes:
            process.start()
    answers = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    found: dict[str, float] = {}
    for answer in answers:
        if "error" in answer:
            raise AssertionError(answer["error"])
        found |= answer
    return found


def _rank(
    rank: int, folder: str, cases: Mapping[str, tuple[str, str]], samples: int, profiled: str, queue: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    batch = load_model(MODEL).batch(samples, 0, 0)
    found: dict[str, Any] = {}
    try:
        for name, (path, text) in cases.items():
            with profile(activities=[ProfilerActivity.CPU]) if name == profiled else nullcontext() as kept:
                made = _step(rank, path, parse(text, Modules), batch)
            if kept is not None:
                kept.export_chrome_trace(f"{folder}/{rank}.json")
            if made:
                found[name] = sum(made)
            dist.barrier()
    except Exception as error:  # a rank that dies is one that the others wait for
        found = {"error": f"rank {rank}: {type(error).__name__}: {error}"}
    queue.put(found)
    dist.destroy_process_group()


def _step(rank: int, path: str, modules: Modules, batch: Mapping[str, Tensor]) -> Sequence[float]:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    whole, count = decoder(), len(modules.stages)
    names = [[name.removeprefix("decoder.") for name in stage.modules or ()] for stage in modules.stages]
    stages = [
        PipelineStage(only(whole, names[number]), number, count, torch.device("cpu"))
        for number, stage in enumerate(modules.stages)
        if stage.rank == rank
    ]
    schedule = _PipelineScheduleRuntime(stages, modules.num_microbatches, loss_fn=loss_of, scale_grads=False)
    schedule._load_csv(path, format="compute_only")
    found: list[Tensor] = []
    given = (batch["tokens"],) if any(stage.is_first for stage in stages) else ()
    last = any(stage.is_last for stage in stages)
    schedule.step(*given, **({"target": batch["targets"], "losses": found} if last else {}))
    return [float(loss.detach()) for loss in found]
