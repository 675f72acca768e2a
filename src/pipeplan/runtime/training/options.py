"""The options of a training, and the outcome of a run next to what its plan predicted."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import signal
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

from pipeplan.costs.recipes import checked_recipe, gradient_format
from pipeplan.costs.throughput import PASSES, Throughput, Yardstick
from pipeplan.display import Displayed
from pipeplan.errors import UsageError, choose_from
from pipeplan.files import Plan, Recipe
from pipeplan.files.recipe import ADAMW, AUTOCAST
from pipeplan.runtime.launch.job import Evaluated, ExpertLoad, RunOptions, RunResult, Started, StepResult
from pipeplan.runtime.models.given_names import Name, PythonValue, is_configuration, require_importable, require_model
from pipeplan.runtime.training.weight_files import files_of
from pipeplan.units import format_ns
from pipeplan.workload.folding import of_devices

OPTIMIZERS = {
    "adamw": "torch.optim:AdamW",
    "adam": "torch.optim:Adam",
    "momentum": "torch.optim:SGD",
    "sgd": "torch.optim:SGD",
}
"""Optimizers by name."""

MOMENTUM = 0.9

RUNNABLE = {
    "fp32": "float32",
    "bf16": "bfloat16",
    AUTOCAST: "float32",
    "bf16-mixed": "bfloat16",
    "fp16-mixed": "float16",
}
"""Recipes that a run can follow, and the number format of the parameters that compute."""

FORWARDS_IN = {"fp32-inference": "float32", "bf16-inference": "bfloat16", "fp16-inference": "float16"}
"""Recipes of inference, and the number format of the parameters."""

OF_TRAINING = {
    "precision": None,
    "optimizer": None,
    "learning_rate": None,
    "weight_decay": None,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "lr_steps": None,
    "clip_norm": None,
    "eval_data": None,
    "checkpoint": None,
    "resume": False,
    "export_weights": None,
}
"""Options that mean nothing where nothing is trained, and what they are where nobody gave them."""

MASTERED = ("bf16-mixed", "fp16-mixed")
"""Those with master copies of parameters."""

IS_RANK = "PIPEPLAN_RANK"
"""Set in the environment of a rank that trains: what it imports would otherwise start others in turn."""

_OFF = 0.1
"""Share of the predicted time by which an iteration may be off without a word."""

LR_SCHEDULES = ("constant", "cosine", "linear")

DTYPES = {"float32": "float32", "float64": "float64", "bfloat16": "bfloat16", "float16": "bfloat16"}
"""A plan's number format -> the one to train in, which has as many bytes: float16 needs losses to be scaled."""


@dataclass(frozen=True, slots=True)
class TrainOptions(RunOptions):
    """How to train with a plan. ``model`` is a name of the zoo, shortened to ``sequence`` if given, a configuration, or
    ``pkg.mod:factory``; ``grain`` is what a block of a captured model is. ``instructions`` is a module, ``pkg.mod``,
    that registers what the plan's custom ops do. ``dtype`` is the plan's where it is None (:meth:`by_plan`).

    ``optimizer`` is one of ``OPTIMIZERS`` or ``pkg.mod:factory``, a function of parameters that returns one;
    ``learning_rate`` and ``weight_decay`` are handed to it where they are given. ``lr_schedule`` is one of
    ``LR_SCHEDULES`` or ``pkg.mod:factory``, a function of an optimizer; ``lr_steps`` is how many steps it spans, all
    if None. ``clip_norm`` is the largest norm of all gradients together, None to leave it out.

    ``precision`` is the recipe that training follows, ``dtype`` the number format of parameters; both and ``optimizer``
    are the plan's where they are None, of which :meth:`by_plan` makes options that say all three, and in which format
    ``gradients`` add up where that may be another than the parameters'.

    ``data`` is where samples come from, see :func:`pipeplan.runtime.training.data.with_data`; None for those a model
    makes up. ``eval_data`` are others that are not trained on: every ``eval_every`` steps and after the last one,
    ``eval_batches`` mini-batches of them, or all, run forward alone.

    Where a name may stand, so may what it would name, as a :class:`~pipeplan.runtime.models.given_names.PythonValue`.

    ``checkpoint`` is the folder of checkpoints, written every ``checkpoint_every`` steps and after the last one, but
    not where loss or norm of gradients are not finite; ``keep_checkpoints`` of them are left there. ``resume`` goes on
    from the last: ``num_steps`` counts from the training's beginning.

    ``backend_rules`` are modules with kernel backends of a user's own; ``kernels`` says of each that is known, by name,
    what :class:`~pipeplan.runtime.training.kernel_segments.KnownBackend` has.

    ``tensorboard`` is the folder of a log for TensorBoard, which rank 0 writes.

    ``init`` is a safetensors file that parameters start from, an index of several, or a Hugging Face folder,
    ``export_weights`` a file that they are written to in the end; see :mod:`pipeplan.runtime.training.weights`.
    """

    model: Name
    sequence: int | None = None
    grain: Literal["layer", "half", "operator"] | None = None
    seed: int = 0
    dtype: str | None = None
    precision: str | None = None
    gradients: str | None = None
    instructions: str | None = None
    optimizer: Name | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    lr_schedule: Name = "constant"
    warmup_steps: int = 0
    lr_steps: int | None = None
    clip_norm: float | None = None
    data: Name | None = None
    eval_data: Name | None = None
    eval_every: int | None = None
    eval_batches: int | None = None
    tensorboard: str | None = None
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    resume: bool = False
    init: str | None = None
    export_weights: str | None = None
    backend_rules: Sequence[str] = ()
    kernels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    job: ClassVar[str] = "pipeplan.runtime.training.trainer:train_job"

    def require_consistent(self) -> None:
        """Refuse options that mean nothing without another, and names that are none. Raises UsageError."""
        if IS_RANK in os.environ:
            raise UsageError(
                "a rank cannot start ranks: the module that it imports for its model does so; put the call of run "
                'under if __name__ == "__main__":'
            )
        if isinstance(self.model, str):
            if self.model.endswith(".json") and not os.path.isfile(self.model):
                raise UsageError(f"--model {self.model}: there is no such file")
            require_model(self.model)
        for flag, data in (("--data", self.data), ("--eval-data", self.eval_data)):
            if isinstance(data, str) and data != "builtin" and ":" not in data and not os.path.exists(data):
                raise UsageError(f"{flag} {data} cannot be read: there is no such file")
        for flag, number in (("--eval-every", self.eval_every), ("--eval-batches", self.eval_batches)):
            if number is not None and self.eval_data is None:
                raise UsageError(f"{flag} needs --eval-data, the samples to evaluate on")
        if self.optimizer is not None:
            _require_known("--optimizer", self.optimizer, list(OPTIMIZERS))
        _require_known("--lr-schedule", self.lr_schedule, LR_SCHEDULES)
        if self.tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
            raise UsageError(
                "--tensorboard needs the package tensorboard, which is not installed: pip install "
                "'pipeplan[tensorboard]'"
            )
        for flag, given in (("--resume", self.resume), ("--checkpoint-every", self.checkpoint_every)):
            if given and self.checkpoint is None:
                raise UsageError(f"{flag} needs --checkpoint DIR, the folder of checkpoints")
        if self.init is not None and self.resume:
            raise UsageError("--init starts from a file and --resume from a checkpoint; leave out one of the two")
        if self.init is not None:
            files_of(self.init)
        there = self.export_weights is not None and os.path.exists(self.export_weights)
        if there and not os.path.isfile(str(self.export_weights)):
            raise UsageError(f"--export-weights {self.export_weights}: it is not a regular file; choose another")
        for what, path in self._imported():
            require_importable(path, what)

    def _imported(self) -> Iterator[tuple[str, str]]:
        """What ranks will import, and for what."""
        if isinstance(self.model, str) and not is_configuration(self.model) and ":" in self.model:
            yield "model", self.model
        for flag, data in (("--data", self.data), ("--eval-data", self.eval_data)):
            if isinstance(data, str) and ":" in data and not os.path.exists(data):
                yield flag, data
        for flag, given in (("--optimizer", self.optimizer), ("--lr-schedule", self.lr_schedule)):
            if isinstance(given, str) and ":" in given:
                yield flag, given
        if self.instructions is not None:
            yield "--instructions", self.instructions

    def with_grain_of(self, plan: Plan) -> Self:
        """The same, with whole layers as a configuration's blocks where the plan's are, unless they say a grain."""
        return replace(self, grain=self.grain or grain_of(plan, self.model))

    def by_plan(self, plan: Plan) -> Self:
        """The same, with what it leaves to the plan's recipe, or without one to its number format.

        Raises:
            UsageError: a recipe that no run can follow, or whose parameters have another format than ``dtype``.
        """
        if plan.is_inference:
            return self._of_inference(plan)
        if plan.recipe is not None and not plan.recipe.is_custom:
            made_for = plan.recipe
        elif self.dtype is None and self.precision is None:
            dtype = DTYPES.get(plan.provenance.dtype, "float32")
            return replace(self, dtype=dtype, optimizer=self.optimizer or ADAMW)
        else:
            made_for = Recipe(name="fp32")
        name = self.precision if self.precision is not None or self.dtype is not None else made_for.name
        *first, last = RUNNABLE
        usable = f"--precision {', '.join(first)} or {last}"
        if name is not None and name not in RUNNABLE:
            raise UsageError(
                f"{f'--precision {name}' if self.precision else f'the plan was made for the recipe {made_for}'}: run "
                f"has no products in FP8, so it cannot train with {name} yet; give {usable}, to the run or to a new "
                "search"
            )
        keeps = name in MASTERED
        if name is not None and self.precision is None and made_for.gradient_dtype is not None and not keeps:
            raise UsageError(
                f"the plan was made for the recipe {made_for}: a run's gradients have the parameters' format; give "
                f"{usable} to the run, or search without --gradient-dtype"
            )
        own = None if name is None else RUNNABLE[name]
        if self.dtype is not None and own not in (None, self.dtype):
            raise UsageError(f"--precision {name} trains parameters in {own}; leave --dtype {self.dtype} out")
        optimizer = self.optimizer or made_for.optimizer
        found = replace(self, dtype=own or self.dtype, precision=name, optimizer=optimizer)
        if name is None or not keeps or self.gradients is not None:
            return found
        recipe = made_for if made_for.name == name else checked_recipe(name)
        return replace(found, gradients="float32" if gradient_format(recipe) == "fp32" else own)

    def _of_inference(self, plan: Plan) -> Self:
        """The same for forwards alone, in the format of the plan's recipe. Raises UsageError."""
        if plan.decode is not None:
            raise UsageError(
                f"plan {plan.name!r} has decode steps, which generate text: give --prompt-file and --new-tokens, or "
                "--emulate"
            )
        given = next((name for name, default in OF_TRAINING.items() if getattr(self, name) != default), None)
        if given is not None:
            raise UsageError(
                f"--{given.replace('_', '-')} is of training, and plan {plan.name!r} is of inference, which runs "
                "forwards alone; leave it out, or search a profile of training"
            )
        return replace(self, dtype=self.dtype or format_of(plan))

    @property
    def has_objects(self) -> bool:
        """Whether some name is what Python has given instead."""
        return any(isinstance(getattr(self, each.name), PythonValue) for each in fields(self))

    def said(self) -> dict[str, object]:
        """All of them, for comparison: objects by what they are called."""
        return {name: str(value) if isinstance(value, PythonValue) else value for name, value in self.as_json().items()}

    @property
    def autocast(self) -> str | None:
        """The format that blocks compute in where that is not the parameters'."""
        return "bfloat16" if self.precision == AUTOCAST else None

    @property
    def number_format(self) -> str:
        """The number format of parameters, of those that compute where there are master copies."""
        return self.dtype or "float32"

    @property
    def keeps_masters(self) -> bool:
        """Whether optimizers step master copies of parameters."""
        return self.precision in MASTERED

    @property
    def scales_loss(self) -> bool:
        """Whether losses are scaled, so that gradients in float16 do not vanish."""
        return self.keeps_masters and self.number_format == "float16"

    @property
    def schedule_steps(self) -> int:
        """Steps that the learning-rate schedule spans."""
        return self.num_steps if self.lr_steps is None else self.lr_steps

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is written after a step."""
        if self.checkpoint is None:
            return False
        every = self.checkpoint_every or self.num_steps
        return (step + 1) % every == 0 or step + 1 == self.num_steps

    def evaluates_after(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        if self.eval_data is None:
            return False
        return step + 1 == self.num_steps or (self.eval_every is not None and (step + 1) % self.eval_every == 0)

    @property
    def identity(self) -> dict[str, object]:
        """What a training is, by the flags that say so, as far as these options do: all that its losses depend on."""
        spans = self.schedule_steps if self.lr_schedule in ("cosine", "linear") else None
        return {
            "--sequence": self.sequence,
            "--grain": self.grain or "half",
            "--dtype": self.number_format,
            "--seed": self.seed,
            "--optimizer": str(self.optimizer or ADAMW),
            "--lr": self.learning_rate,
            "--weight-decay": self.weight_decay,
            "--lr-schedule": str(self.lr_schedule),
            "--warmup-steps": self.warmup_steps,
            "--lr-steps": spans,
            "--clip-norm": self.clip_norm,
            "--autocast": self.autocast,
            "--precision": self.precision if self.keeps_masters else None,
        }


def settled(options: RunOptions, plan: Plan) -> RunOptions:
    """The options with what the plan says where they leave it open.

    Raises:
        UsageError: the plan contradicts them, or is of a training that ranks cannot do.
    """
    alone = next((n for n, stage in enumerate(plan.stages) if not stage.blocks), None)
    if alone is not None and max(each.context for each in plan.stages) > 1 and isinstance(options, TrainOptions):
        raise UsageError(
            f"stages[{alone}] of the plan is of instructions, which know nothing of the pieces of sequences that "
            "devices of other stages have (context parallelism); search with --cp 1"
        )
    return options.with_grain_of(plan).by_plan(plan) if isinstance(options, TrainOptions) else options


def grain_of(plan: Plan, model: Name) -> Literal["layer"] | None:
    """What a configuration's blocks are where the plan's are whole layers; None: as they usually are."""
    ids = [block for stage in plan.stages for block in stage.blocks]
    layers = [id_ for id_ in ids if _OF_A_LAYER.search(id_)]
    whole = bool(layers) and all(_LAYER.search(id_) for id_ in layers)
    return "layer" if whole and isinstance(model, str) and is_configuration(model) else None


def format_of(plan: Plan) -> str:
    """The number format of parameters that a plan of inference is for, or of as many bytes."""
    planned = FORWARDS_IN.get(plan.recipe.name) if plan.recipe is not None else None
    return planned or DTYPES.get(plan.provenance.dtype, "float32")


_OF_A_LAYER, _LAYER = re.compile(r"\.\d+(\.|$)"), re.compile(r"\.\d+$")
"""Names of a layer's blocks, and of the layer as one block."""


def _require_known(flag: str, name: Name, known: Sequence[str]) -> None:
    """Refuse anything that is neither a known name nor importable, before processes start."""
    if isinstance(name, str) and ":" not in name and name not in known:
        raise UsageError(
            f"{flag} {name!r} is neither known nor of the form pkg.mod:factory; {choose_from(name, known)}"
        )


def throughput_of(plan: Plan, options: TrainOptions, known: RunResult | Started, iteration_ns: int) -> Throughput:
    """What an iteration means, of a run of which this is known; see :attr:`RunOutcome.throughput`."""
    where = known.versions.get("device", "") if options.transport == "nccl" else ""
    tokens, planned = known.tokens_per_sample, plan.provenance
    same = known.as_planned and tokens == planned.tokens_per_sample
    flops = planned.forward_flops_per_sample if same else None
    dtype, peaks = options.autocast or options.number_format, Yardstick.of_plan(plan).peaks
    measure = Yardstick(where, dtype, tokens, flops, peaks=peaks, passes=1 if plan.is_inference else PASSES)
    return measure.throughput(plan.mini_batch, iteration_ns, sum(plan.device_speeds))


_MOST_SHOWN = 20
"""Steps whose losses are shown of a run."""


@dataclass(frozen=True, slots=True)
class RunOutcome(Displayed):
    """What was run, how, and what came of it; ``others_cores`` of this machine's other processes had on average."""

    plan: Plan
    options: RunOptions
    result: RunResult
    others_cores: float | None = None

    def __repr__(self) -> str:
        times = f"iteration {format_ns(self.warm_ns)}, predicted {format_ns(self.predicted_ns)}"
        ended = "" if self.stopped_by is None else f", ended by {self.stopped_by.name}"
        return f"<RunOutcome {self.plan.name!r}: {len(self.result.steps)} steps, {times}{ended}>"

    def lines(self) -> Iterator[str]:
        """What is shown of it: the times, and the loss of each step; of many steps the first and the last ones."""
        yield repr(self)[1:-1]
        steps = [f"{each.step:>6}  {each.loss:<10.6g}  {format_ns(each.iteration_ns)}" for each in self.result.steps]
        if steps:
            yield "  step  loss        iteration"
        yield from steps if len(steps) <= _MOST_SHOWN else [*steps[:3], "   ...", *steps[3 - _MOST_SHOWN :]]

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The signal that asked the training to end, on every rank the same; None if there was none.

        It has then written a checkpoint after the step that it was in, and left out those that were to follow.
        """
        return signal.Signals(self.result.stopped_by) if self.result.stopped_by else None

    @property
    def predicted_ns(self) -> int:
        """The prediction for the iteration as it was run, with gradient sums, and stretched if times were."""
        return round(self.plan.predicted.whole_ns * self.result.stretch)

    @property
    def throughput(self) -> Throughput | None:
        """Of the median iteration where a model is trained, of the model's tokens, on the device that it ran on.

        Utilisation is not known where ranks may share a device, as they can without NCCL, and where the model is
        another than the one that the plan was made for.
        """
        if not isinstance(self.options, TrainOptions) or not self.result.steps:
            return None
        return throughput_of(self.plan, self.options, self.result, self.warm_ns)

    @property
    def warm_ns(self) -> int:
        """The median iteration; of several steps the first, which warms up, is left out. 0 without any."""
        times = [step.iteration_ns for step in self.result.steps]
        return round(statistics.median(times[1:] or times or [0]))

    @property
    def is_off(self) -> bool:
        """Whether the median is clearly another time than predicted."""
        return bool(self.result.steps) and self._differs(self.warm_ns, self.predicted_ns)

    @staticmethod
    def _differs(measured_ns: int, predicted_ns: int) -> bool:
        return predicted_ns > 0 and abs(measured_ns / predicted_ns - 1) > _OFF

    def figures(self) -> dict[str, object]:
        """The object of ``run --json``, in which what is not finite is None; ``iteration_ns`` is of all steps."""
        if isinstance(self.options, TrainOptions):
            return self._trained(self.options)
        return self._emulated()

    def _emulated(self) -> dict[str, object]:
        return {
            "plan": self.plan.name,
            "num_ranks": self.plan.num_devices,
            "blocking": self.options.blocking,
            "stretch": self.result.stretch,
            **self._times(),
            "steps": [{"step": step.step, "iteration_ns": step.iteration_ns} for step in self.result.steps],
            "versions": dict(self.result.versions),
        }

    def _trained(self, options: TrainOptions) -> dict[str, object]:
        plan, result = self.plan, self.result
        return {
            "plan": plan.name,
            "model": str(options.model),
            "num_ranks": plan.num_devices,
            "device": options.device,
            "dtype": options.number_format,
            "precision": options.precision,
            "backend": options.transport,
            "num_microbatches": plan.num_microbatches,
            **self._times(),
            **({} if self.throughput is None else self.throughput.figures()),
            "steps": list(map(_finite_of, result.steps)),
            "evaluations": list(map(_finite_of, result.evaluations)),
            "peak_memory_bytes": list(result.peak_memory_bytes),
            "predicted_peak_memory_bytes": of_devices(
                plan.players, [memory.peak_bytes for memory in plan.predicted.memory]
            ),
            **({"experts": _loads_of(result.experts)} if result.experts else {}),
            "versions": dict(result.versions),
        }

    def _times(self) -> dict[str, object]:
        return {
            "iteration_ns": round(statistics.median([step.iteration_ns for step in self.result.steps] or [0])),
            "predicted_iteration_ns": self.predicted_ns,
        }


def _loads_of(experts: Sequence[ExpertLoad]) -> dict[str, object]:
    """What ``profile --load-factor`` reads, and what it was made of."""
    factor = statistics.fmean(each.load_factor for each in experts)
    return {"load_factor": factor, "blocks": [asdict(each) for each in experts]}


def _finite_of(result: StepResult | Evaluated) -> dict[str, object]:
    """Its figures, None for those that JSON has no numbers for."""
    return {name: value if value is None or math.isfinite(value) else None for name, value in asdict(result).items()}
