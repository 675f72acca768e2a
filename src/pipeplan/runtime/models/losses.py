"""Whether gradients of micro-batches add up: two samples together are compared with the two alone, block by block.

A loss that is the sum over its samples does not show how a mini-batch is divided. A mean does, unless each micro-batch
counts by what its mean is over; then gradients are those of the mean over the whole mini-batch. Whatever else makes a
sample's numbers depend on those beside it has gradients that depend on the plan, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeplan.errors import UsageError
from pipeplan.runtime.models.shapes import outputs_of
from pipeplan.runtime.models.spec import Batch, BlockSpec, Model
from pipeplan.runtime.parallel.batch_norms import batch_norms, num_batch_norms
from pipeplan.runtime.parallel.device import precise

_DRAWN = 8
"""Samples among which two that are unlike are looked for."""

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Formats to compare in, the better first; and what rounding may change, in parts of the largest number."""

_LEFT_OUT = (-100, -1, 0)
"""Integers that targets commonly have where there is nothing to predict."""


@dataclass(frozen=True, slots=True)
class Mean:
    """What the loss of a block is a mean over: samples; or what counts in the tensor ``over`` of the batch.

    In it count entries other than ``ignored``, or, where that is None, its numbers are weights. With ``weights``
    [classes], which the block has by the name of ``table``, its entries are classes: each counts by the weight of its
    class, and what is no class, or ``ignored``, by nothing. ``argument`` of the block shows how much counts; of samples
    it has ``rows`` each. Where a tensor (first) has an integer (second) of ``unclear``, the loss is no such mean.
    """

    argument: int
    rows: int = 1
    over: str = ""
    ignored: int | None = None
    unclear: tuple[tuple[str, int], ...] = ()
    table: str = ""
    weights: Tensor | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        """What it is over."""
        if not self.over:
            return "samples"
        if self.table:
            but = "" if self.ignored is None else f" that are not {self.ignored}"
            return f"the entries of {self.over!r}{but}, weighted by class ({self.table!r})"
        if self.ignored is None:
            return f"the weights {self.over!r}"
        return f"the entries of {self.over!r} that are not {self.ignored}"

    def count(self, tensor: Tensor) -> Tensor | int:
        """How much of ``tensor``, the block's argument or the batch's, counts."""
        if not self.over:
            return tensor.shape[0] // self.rows
        if self.weights is not None:
            counts = (tensor >= 0) & (tensor < len(self.weights))
            if self.ignored is not None:
                counts &= tensor != self.ignored
            return self.weights.to(tensor.device)[tensor[counts]].sum()
        return tensor.sum() if self.ignored is None else (tensor != self.ignored).sum()


@dataclass(frozen=True, slots=True)
class Finding:
    """By block, what losses are means over; none where all are sums. ``text`` is what a user should know, if any.

    ``brief`` is the same for who has read it before. ``sure``: it was found out, and not only supposed.
    """

    means: Mapping[str, Mean]
    text: str = ""
    brief: str = ""
    sure: bool = True

    def summed(self, model: Model) -> Model:
        """The model with a mean as a sum over what it is over, and as many predictions."""
        if not self.means:
            return model
        mean = next(iter(self.means.values()))
        blocks = [
            replace(block, build=partial(_built, block, self.means[block.id]), split=None, splits={})
            if block.id in self.means
            else block
            for block in model.blocks
        ]
        return replace(model, blocks=tuple(blocks), predictions=partial(_counted, mean))


def _counted(mean: Mean, batch: Batch) -> float:
    if not mean.over:
        return next(iter(batch.values())).shape[0]
    return float(mean.count(batch[mean.over]))


def _built(block: BlockSpec, mean: Mean) -> nn.Module:
    module = block.build()
    module.register_forward_hook(partial(_as_sum, block, mean))  # names of parameters stay as they are
    return module


def _as_sum(block: BlockSpec, mean: Mean, _: nn.Module, arguments: tuple[Tensor, ...], made: Tensor) -> Tensor:
    """The mean times what counts; where nothing does it is 0, and not 0 / 0."""
    given = arguments[mean.argument]
    if given.is_meta:
        return made
    for name, value in mean.unclear:
        if bool((arguments[_place(block, name)] == value).any()):
            raise ValueError(
                f"the loss is a mean over {mean.text}, but neither that nor a sum where {name!r} has {value}; return "
                "the sum over predictions"
            )
    counted = mean.count(given)
    if isinstance(counted, Tensor) and not counted.any():
        return made.new_zeros(())
    return precise(made) * counted


def _place(block: BlockSpec, name: str) -> int:
    """Which argument of the block a tensor of the batch is."""
    return len(block.inputs) + block.samples.index(name)


# Finding out --------------------------------------------------------------------------------------------------------


def find_losses(model: Model, *, seed: int = 0, device: torch.device | str = "cpu") -> Finding:
    """Compare what the model makes of two samples with what it makes of each, in one block's memory at a time.

    Nothing is computed for models that say what their loss is of. Raises UsageError where samples depend on those
    beside them; the text has the block and the numbers.
    """
    if model.loss_of == "micro-batches":
        text = f"the loss of {model.name} compares the samples of a micro-batch: with another size it is another loss"
        return Finding({}, text, text)
    if model.loss_of == "samples" or not any(block.loss for block in model.blocks):
        return Finding({})
    reason = ""
    for dtype in _TOLERANCES:
        try:
            return _TwoSamples(model, seed, torch.device(device), dtype).find()
        except _FailedError as error:
            reason = str(error)
    text = f"whether the loss of {model.name} is a sum could not be found out: {reason}"
    return Finding({}, text, text, sure=False)


class _FailedError(Exception):
    """Two samples together cannot be computed; the run itself will say so, if it cannot either."""


@dataclass(frozen=True, slots=True)
class _BothAndEach:
    """A tensor for two samples, and for each alone: its rows, or itself where it is one for all samples."""

    together: Tensor
    alone: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, together: Tensor, per_sample: int | None) -> _BothAndEach:
        """``per_sample`` rows are a sample's, None where all are for all samples."""
        if per_sample is None:
            return cls(together, (together, together))
        first, second = together[:per_sample], together[per_sample:]
        return cls(together, (first, second))


@dataclass(frozen=True, slots=True)
class _Losses:
    """A loss of two samples, and of each."""

    together: float
    alone: tuple[float, float]

    @property
    def scale(self) -> float:
        """Infinite or no number where one of them is."""
        return max(abs(each) for each in (self.together, *self.alone))

    def agree(self, weights: tuple[float, float] | None, tolerance: float) -> bool:
        """Whether two together have the mean with these weights, or the sum of the two."""
        if weights is None:
            expected = sum(self.alone)
        elif not sum(weights):
            return False
        else:  # what has no weight may have no loss that is a number
            expected = sum(w * loss for w, loss in zip(weights, self.alone, strict=True) if w) / sum(weights)
        most = max(abs(each) for each in (self.together, *self.alone) if math.isfinite(each))
        return abs(self.together - expected) <= tolerance * most


class _Form(NamedTuple):
    """What a loss may be a mean over, as of :class:`Mean`; the sum is None."""

    over: str
    ignored: int | None = None
    table: str = ""


_SAMPLES = _Form("")


class _TwoSamples:
    """One pass over a model's blocks, each of which gets for each sample alone what it has made of the two."""

    def __init__(self, model: Model, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.seed, self.device, self.dtype = model, seed, device, dtype
        self.tolerance = _TOLERANCES[dtype]
        try:
            drawn = model.mini_batch(_DRAWN, 0, seed, dtype=dtype, device=device)
        except UsageError as error:
            raise _FailedError(str(error)) from error
        rows = list(_unlike(drawn))
        self.batch = {name: _BothAndEach.of(tensor[rows], 1) for name, tensor in drawn.items()}
        self.integers = {
            name: sorted({*_LEFT_OUT, int(tensor.min()), int(tensor.max())})
            for name, tensor in drawn.items()
            if not tensor.is_floating_point() and tensor.dtype != torch.bool
        }
        self.unknown: list[str] = []
        self.num_batch_norms = 0
        self.tables: dict[str, Tensor] = {}

    def find(self) -> Finding:
        """Raises UsageError as :func:`find_losses`, and _FailedError."""
        values: dict[tuple[str, int], _BothAndEach] = {}
        means: dict[str, Mean | None] = {}
        texts = []
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            for block in self.model.blocks:
                given = [values[source] for source in block.inputs] + [self.batch[name] for name in block.samples]
                module = self.model.build(block.id, self.seed, dtype=self.dtype, device=self.device)
                self._leave_out_batch_norms(module)
                made, alone, random = self._run(block, module, given)
                if block.loss and len(made) == 1 and made[0].ndim == 0:
                    values[block.id, 0] = _BothAndEach(made[0], (alone[0][0], alone[1][0]))
                    losses = _Losses(float(made[0]), (float(alone[0][0]), float(alone[1][0])))
                    means[block.id] = None if random else self._loss(block, module, given, losses)
                    texts.append(f"two samples together {losses.together:.6g}, alone {_listed(losses.alone)}")
                    continue
                for index, tensors in enumerate(zip(made, *alone, strict=True)):
                    values[block.id, index] = self._compare(block, module, *tensors, random=random)
        found = self._found(means, texts)
        beside = self._of_micro_batches()
        text, brief = (". ".join(filter(None, (each, beside))) for each in (found.text, found.brief))
        return replace(found, text=text, brief=brief)

    def _leave_out_batch_norms(self, module: nn.Module) -> None:
        """They are there to reveal operators that mix samples; anything else that does so shows without them."""
        norms = batch_norms(module)
        self.num_batch_norms += num_batch_norms(norms)
        for each in norms:
            each.training = False

    def _of_micro_batches(self) -> str:
        if not self.num_batch_norms:
            return ""
        return (
            f"BatchNorm x {self.num_batch_norms} of {self.model.name}, in training mode, takes the mean and variance "
            "of each micro-batch, as pipelines do: what is computed depends on its size"
        )

    def _run(
        self, block: BlockSpec, module: nn.Module, given: Sequence[_BothAndEach]
    ) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, ...]], bool]:
        """What a block makes of both, of each, and whether that is random; dropout is left out."""
        made, random = self._call(module, [each.together for each in given])
        if random:
            for each in module.modules():
                each.training = False
            made, random = self._call(module, [each.together for each in given])
        if random:
            self.unknown.append(f"block {block.id!r} draws random numbers even in evaluation mode")
        try:
            alone = [self._call(module, [each.alone[index] for each in given])[0] for index in (0, 1)]
        except _FailedError as error:
            raise UsageError(
                f"model {self.model.name!r}: block {block.id!r} takes two samples but not a single one ({error}), so "
                f"gradients depend on the micro-batch size; {_remedy(module)}"
            ) from error
        return made, alone, random

    def _call(self, module: nn.Module, arguments: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], bool]:
        """What a block makes, and whether it has drawn random numbers."""
        before = self._random_state()
        try:
            made = outputs_of(module(*arguments))
        except Exception as error:  # whatever a block raises
            raise _FailedError(f"{type(error).__name__}: {error}") from error
        if made is None:
            raise _FailedError("a block returned something that is not a tensor")
        return made, not torch.equal(before, self._random_state())

    def _random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _compare(
        self, block: BlockSpec, module: nn.Module, made: Tensor, first: Tensor, second: Tensor, *, random: bool
    ) -> _BothAndEach:
        """The tensor for the blocks that take it. Raises UsageError where it depends on the samples beside one."""
        broadcast = made.shape == first.shape == second.shape
        if not broadcast and (made.ndim == 0 or first.shape != second.shape or 2 * len(first) != len(made)):
            raise _FailedError(
                f"block {block.id!r} makes {list(made.shape)} of two samples, {list(first.shape)} of one"
            )
        values = _BothAndEach.of(made, None if broadcast else len(first))
        for alone, rows in zip((first, second), values.alone, strict=True):
            off, most = _distance(alone, rows), _largest(rows)
            if not random and off > self.tolerance * most:
                raise UsageError(
                    f"model {self.model.name!r}: block {block.id!r} makes other numbers of a sample when another is "
                    f"beside it (off by {off:.3g} where the largest is {most:.3g}), so gradients depend on the "
                    f"micro-batch size; {_remedy(module)}"
                )
        return values

    def _loss(self, block: BlockSpec, module: nn.Module, given: Sequence[_BothAndEach], losses: _Losses) -> Mean | None:
        """What a loss is a mean over, None where it is a sum. Raises UsageError where it is neither."""
        if losses.scale == 0 or not math.isfinite(losses.scale):
            self.unknown.append(f"two samples have the loss {losses.together:.3g}")
            return None
        self.tables = {
            name: buffer.detach().cpu()
            for name, buffer in module.named_buffers()
            if buffer.ndim == 1 and buffer.is_floating_point()
        }
        forms: list[_Form | None] = [None, _SAMPLES]
        for name in block.samples:
            forms += [_Form(name, value) for value in self.integers.get(name, (None,))]
        classes = [name for name in block.samples if name in self.integers]
        for name, table in product(classes, self.tables):
            forms += [_Form(name, value, table) for value in (None, *self.integers[name])]
        fitting = [form for form in forms if losses.agree(self._weights(form, self.batch), self.tolerance)]
        if not fitting:
            raise UsageError(self._neither(block, losses))
        if None in fitting:
            return None
        unclear = []
        for name, value, batch in self._changed(block):
            changed = self._losses_of(block, module, given, batch)
            if changed is None:
                continue
            still = [form for form in fitting if changed.agree(self._weights(form, batch), self.tolerance)]
            if not still and value is not None:
                unclear.append((name, value))
            fitting = still or fitting
        over, ignored, table = next((form for form in fitting if form == _SAMPLES), fitting[0]) or _SAMPLES
        argument = _place(block, over) if over else len(block.inputs) if block.samples else 0
        rows = 1 if over or block.samples else len(given[0].alone[0])
        return Mean(argument, rows, over, ignored, tuple(unclear), table, self.tables.get(table))

    def _neither(self, block: BlockSpec, losses: _Losses) -> str:
        """What is wrong, why that matters, and what to do, in three lines."""
        total, classes = sum(losses.alone), [name for name in block.samples if name in self.integers]
        between = min(losses.alone) < losses.together < max(losses.alone)
        remedy = "return the sum over predictions, without terms of anything else"
        return (
            f"model {self.model.name!r}: the loss of block {block.id!r} is {losses.together:.6g} for two samples "
            f"together and {_listed(losses.alone)} for each alone: neither the sum ({total:.6g}) nor the mean "
            f"({total / 2:.6g})\n"
            "why it matters: gradients would depend on the micro-batch size\n"
            f"what to do: {_weighted(classes[0]) if between and classes else remedy}. {_MEANT}"
        )

    def _changed(self, block: BlockSpec) -> Iterator[tuple[str, int | None, dict[str, _BothAndEach]]]:
        """The batch with the end of the first sample of a tensor left out, in all ways that are common."""
        for name in block.samples:
            tensor = self.batch[name].together
            for value in self.integers.get(name, (None,)):
                changed = tensor.clone()
                own = changed[0].view(-1) if changed.ndim > 1 else changed[:1]
                own[-max(1, len(own) // 2) :] = 0 if value is None else value
                yield name, value, {**self.batch, name: _BothAndEach.of(changed, 1)}

    def _losses_of(
        self, block: BlockSpec, module: nn.Module, given: Sequence[_BothAndEach], batch: Mapping[str, _BothAndEach]
    ) -> _Losses | None:
        """On the CPU, where an index that is none does no harm; None where it is one, or the loss no number."""
        taken = [*given[: len(block.inputs)], *(batch[name] for name in block.samples)]
        module = module.cpu()
        try:
            together, *alone = (
                float(self._call(module, [tensor.cpu() for tensor in tensors])[0][0])
                for tensors in zip(*((each.together, *each.alone) for each in taken), strict=True)
            )
        except _FailedError:
            return None
        return _Losses(together, (alone[0], alone[1])) if math.isfinite(together) else None

    def _weights(self, form: _Form | None, batch: Mapping[str, _BothAndEach]) -> tuple[float, float] | None:
        if form is None:
            return None
        if not form.over:
            return 1.0, 1.0
        mean = Mean(0, 1, form.over, form.ignored, table=form.table, weights=self.tables.get(form.table))
        first, second = (float(mean.count(tensor)) for tensor in batch[form.over].alone)
        return first, second

    def _found(self, means: Mapping[str, Mean | None], texts: Sequence[str]) -> Finding:
        name, found = self.model.name, {id_: mean for id_, mean in means.items() if mean is not None}
        if self.unknown:
            text = f"the loss of {name} is taken as a sum: {self.unknown[0]}, which does not show it"
            return Finding({}, text, text, sure=False)
        forms = {None if mean is None else mean.text for mean in means.values()}
        if len(forms) > 1:
            kinds = [
                f"{id_!r} {'the sum' if mean is None else f'a mean over {mean.text}'}" for id_, mean in means.items()
            ]
            raise UsageError(
                f"model {name!r}: its losses are of several kinds, of block {', of block '.join(kinds)}; let all "
                "return the sum over predictions"
            )
        if not found:
            return Finding({})
        mean = next(iter(found.values()))
        return Finding(
            found,
            f"the loss of {name} is a mean over {mean.text} ({texts[0]}): each micro-batch is weighted by its "
            "share of them, so gradients are those of the mean over the mini-batch, whatever the plan",
            f"the loss of {name} is a mean over {mean.text}, as it is trained under every plan",
        )


def _unlike(batch: Batch) -> tuple[int, int]:
    """The first sample, and the one whose integers have another number of their least one: padding, say."""
    counts = torch.zeros(_DRAWN, dtype=torch.int64)
    for tensor in batch.values():
        if not tensor.is_floating_point() and tensor.numel():
            least = (tensor == tensor.min()).view(_DRAWN, -1).sum(1).cpu()
            counts += (least - least[0]).abs()
    return 0, int(counts[1:].argmax()) + 1


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    return float((a.to(torch.float64) - b.to(torch.float64)).abs().max()) if a.numel() else 0.0


def _largest(tensor: Tensor) -> float:
    return float(tensor.to(torch.float64).abs().max()) if tensor.numel() else 0.0


def _weighted(classes: str) -> str:
    """What to do where a loss lies between those of its samples, as one with weights does that nothing shows."""
    return (
        "it lies between the two, as a mean does with weights that neither the batch nor the block shows. Weights of "
        "classes are found where the module has them as a buffer (register_buffer), one number for each class, or as "
        "nn.CrossEntropyLoss(weight=weights), also as the loss of a Sequential. Other weights are found as an input "
        f"of the forward: an argument w, in the example inputs and in every item of --data beside {classes!r}, and "
        "the loss (w * cross_entropy(..., reduction='none')).sum() / w.sum()\nor: it adds means over different "
        "entries, such as one that leaves padding out and one over samples; make each a sum "
        "(reduction='sum') times a constant"
    )


def _listed(numbers: Sequence[float]) -> str:
    return " and ".join(f"{number:.6g}" for number in numbers)


_MEANT = (
    'Where a micro-batch is meant to be a batch of its own, say so with replace(model, loss_of="micro-batches") of a '
    "pipeplan.runtime.models.spec.Model"
)


def _remedy(module: nn.Module) -> str:
    untracked = sorted(
        {type(each).__name__ for each in module.modules() if isinstance(each, _BatchNorm) and _has_none(each)}
    )
    own = (
        f"{' and '.join(untracked)} without running statistics always normalises by the micro-batch: give it "
        "track_running_stats=True, or take nn.GroupNorm or nn.LayerNorm. "
        if untracked
        else "let each sample be computed by itself. "
    )
    return own + _MEANT


def _has_none(norm: _BatchNorm) -> bool:
    return norm.running_mean is None
