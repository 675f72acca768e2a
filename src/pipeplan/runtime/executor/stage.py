"""A stage's blocks on its rank: forward, backward and weight gradients of one micro-batch at a time.

Autograd runs inside a stage only: what enters is a detached leaf, what leaves is detached, and gradients cross in
messages. A micro-batch that ran forward in parts has two graphs for its one backward.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeplan.runtime.executor.channels import TransferError
from pipeplan.runtime.executor.message_graph import Numbers, TensorKey
from pipeplan.runtime.executor.rank_program import ProgramStep, StagePart
from pipeplan.runtime.executor.tensors import WHOLE_TENSOR, Produced, Received, StageLayouts, TensorLayout
from pipeplan.runtime.models.spec import BlockSpec
from pipeplan.runtime.parallel.attention_cores import RecomputedCores
from pipeplan.runtime.parallel.batch_norms import recomputed, samples_shared
from pipeplan.runtime.parallel.device import Autocast, precise
from pipeplan.runtime.parallel.experts import WordCounts, counting
from pipeplan.runtime.parallel.kept_copies import KeptCopy, alone, saving
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue
from pipeplan.workload.elements import AFTER, Again
from pipeplan.workload.kinds import Role

_ANYWHERE = torch.empty(0)  # where a block is that takes nothing and has no parameters

_Root = tuple[GradientEdge, Tensor]
"""Where backward begins, and the gradient there."""


class StageError(Exception):
    """A block failed; the text names it and says where."""


@contextmanager
def stage_errors(what: str) -> Iterator[None]:
    """Say of what a failing action consists; ranks that lost each other say so themselves. Raises StageError."""
    try:
        yield
    except (StageError, TransferError):
        raise
    except Exception as error:
        raise StageError(f"{what}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """A mini-batch, of which blocks take the rows of some samples.

    ``tensors`` [name] has samples in its first dimension. ``num_predictions`` is that of the whole mini-batch: losses
    are sums, and are all scaled by it. ``draw`` is the seed of the run, and the step, on which random numbers depend.
    """

    tensors: Mapping[str, Tensor]
    num_predictions: float
    draw: tuple[int, int] = (0, 0)

    def seed_of(self, block: str, samples: Numbers, piece: int = 0) -> int:
        """The seed of a block's random numbers: the same on every rank, with any stages, and for all shards.

        But of sequences that devices share, pieces have numbers of their own.
        """
        named = f"{self.draw}/{block}/{samples[0]}" + (f"/{piece}" if piece else "")
        digest = hashlib.sha256(named.encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def rows(self, name: str, samples: Numbers) -> Tensor:
        """The rows of these samples."""
        if samples[-1] - samples[0] + 1 == len(samples):
            return self.tensors[name][samples[0] : samples[-1] + 1]
        return self.tensors[name][list(samples)]


@dataclass(slots=True)
class _PartGraph:
    """The graph of one part of a forward: of outputs only their places in it.

    ``handed`` {block: (its place, the leaf that later parts take)} is what goes on inside the stage.
    """

    outputs: dict[str, GradientEdge] = field(default_factory=dict)
    handed: dict[str, tuple[GradientEdge, Tensor]] = field(default_factory=dict)
    loss: Tensor | None = None


@dataclass(slots=True)
class _ForwardGraphs:
    """What a forward keeps for B, or for I: what came, a graph for each part, and the gradients that have come.

    ``values`` and ``outputs`` are for its own later parts.
    """

    inputs: dict[str, Tensor]
    values: _Values | None
    graphs: list[_PartGraph] = field(default_factory=list)
    outputs: dict[TensorKey, Tensor] = field(default_factory=dict)
    gradients: list[tuple[str, Tensor]] = field(default_factory=list)


class _Values:
    """What the blocks of a stage have made of a replica's samples, in every layout that some block takes it in.

    ``saved`` is what blocks have saved of their outputs, where these are made again for them.
    """

    def __init__(
        self,
        layouts: StageLayouts,
        num_samples: int,
        received: Mapping[str, Tensor],
        entering: Mapping[str, TensorLayout],
    ) -> None:
        self._layouts, self._num_samples = layouts, num_samples
        self._given = {name: entering[name] for name in received}
        self._found = {(name, self._given[name]): tensor for name, tensor in received.items()}
        self.saved: dict[str, KeptCopy] = {}

    def receive(self, received: Mapping[str, Tensor], entering: Mapping[str, TensorLayout]) -> None:
        """Take what comes only before a later part."""
        self._given |= {name: entering[name] for name in received}
        self._found |= {(name, entering[name]): tensor for name, tensor in received.items()}

    def hand_on(self, blocks: Iterable[str]) -> dict[str, tuple[GradientEdge, Tensor]]:
        """End a part: what of these blocks' outputs needs gradients, and the leaves that later parts take instead.

        Nothing that was made of others in other layouts is kept: it is of the part's graph.
        """
        self._found = {key: tensor for key, tensor in self._found.items() if key[1] == self._given[key[0]]}
        handed = {}
        for block in blocks:
            key = block, self._given[block]
            tensor = self._found[key]
            self._found[key] = leaf = _leaf(tensor, tensor.requires_grad)
            if tensor.requires_grad:
                handed[block] = get_gradient_edge(tensor), leaf
        return handed

    def put(self, block: str, made: Tensor) -> None:
        """Keep a block's output; a loss is whole."""
        self._given[block] = self._layouts.given.get(block, WHOLE_TENSOR) if made.ndim else WHOLE_TENSOR
        self._found[block, self._given[block]] = made

    def let_go(self, blocks: Collection[str]) -> None:
        """Let go of these blocks' outputs in every layout: what backward needs of them, autograd has."""
        for key in [key for key in self._found if key[0] in blocks] if blocks else ():
            del self._found[key]

    def taken(self, source: str, block: str) -> Tensor:
        """A block's output as another takes it."""
        return self._in(source, self._layouts.taken.get(block, WHOLE_TENSOR))

    def let_go_after(self, source: str, block: str) -> None:
        """Of a block's output keep the copy that another takes, of which the block's own is made again."""
        taken, given = self._layouts.taken[block], self._given[source]
        if taken != given and source in self.saved:
            copy = self.taken(source, block).detach()
            again = partial(self._layouts.converted, source, copy, taken, given, self._num_samples)
            self.saved.pop(source).replace(again)

    def copy_taken(self, source: str, block: str) -> KeptCopy:
        """The copy that a block takes of another's output."""
        return KeptCopy(self.taken(source, block).detach())

    def let_go_before(self, source: str, block: str, copy: KeptCopy) -> None:
        """Of a block's output keep its own copy, of which the one that another has taken is made again."""
        taken, given = self._layouts.taken[block], self._given[source]
        if taken != given:
            own = self.own(source).detach()
            copy.replace(partial(self._layouts.converted, source, own, given, taken, self._num_samples))

    def whole(self, block: str) -> Tensor:
        """A block's output, whole on every device."""
        return self._in(block, WHOLE_TENSOR)

    def own(self, block: str) -> Tensor:
        """A block's output as it was made."""
        return self._found[block, self._given[block]]

    def sliced(self, block: str, layout: TensorLayout) -> Tensor:
        """The values of a block's output in a layout, for others: no gradient comes back this way."""
        with torch.no_grad():
            own = self.own(block).detach()
            return self._layouts.converted(block, own, self._given[block], layout, self._num_samples)

    def _in(self, block: str, layout: TensorLayout) -> Tensor:
        if (block, layout) not in self._found:
            given = self._given[block]
            tensor = self._found[block, given]
            made = self._layouts.converted(block, tensor, given, layout, self._num_samples)
            self._found[block, layout] = alone(made) if made is not tensor else made
        return self._found[block, layout]


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """Blocks of a stage that a kernel backend runs at once, with the backward of which autograd is left to itself.

    ``call`` takes what blocks outside of it have made, ``taken``, and ``samples``, and makes the outputs of ``given``,
    one or a tuple; ``around`` it and its backward stands what the backend sets. None: its blocks run one by one.
    """

    blocks: tuple[str, ...]
    call: Callable[..., object] | None = None
    taken: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    around: Callable[[], AbstractContextManager[object]] = nullcontext


class ExchangedState(Protocol):
    """What a stage asks of the state that it divides with replicas, as its actions come to its blocks, by number."""

    def enter(self, number: int) -> None:
        """A forward comes to a block, which needs its parameters."""

    def leave(self, number: int) -> None:
        """It is done with it."""

    def watch(self, number: int, made: Tensor) -> Tensor:
        """A block's output, of which a backward that comes to it has what it needs, and others what they read."""

    def begin_backward(self, *, adds: bool) -> None:
        """B, I or W begins, of which all but I ``adds`` to gradients."""

    def end_backward(self) -> None:
        """It ends."""


@dataclass(slots=True)
class StageRunner:
    """One stage: its blocks, and the graphs of its forwards that await their backward.

    ``part`` is what the plan says of it, ``specs`` what the model says of each block. Blocks run under ``autocast``, if
    there is one; losses are added up outside of it. ``lack``: what waits for W, and should, where less does. ``state``
    is what it exchanges during the program. ``segments`` are what kernel backends run of it, each of which has a graph
    of its own: of training, or of forwards alone where it is of ``inference``; none: its blocks run one by one.
    Gradients are ``loss_scale`` times those of the loss. What a block makes goes after the last that takes it, but for
    what autograd has. While it is ``evaluating``, nothing is kept; else it counts which experts words choose, by block.
    """

    part: StagePart
    modules: Mapping[str, nn.Module]
    specs: Mapping[str, BlockSpec]
    autocast: Autocast | None = None
    layouts: StageLayouts = field(default_factory=StageLayouts)
    state: ExchangedState | None = None
    loss: Tensor | None = None
    _held: dict[Numbers, _ForwardGraphs] = field(default_factory=dict)
    _queues: dict[int, WeightGradQueue] = field(default_factory=dict)
    _compared: bool = False
    lack: tuple[int, float, str] | None = None
    loss_scale: float = 1.0
    evaluating: bool = False
    inference: bool = False
    segments: Sequence[SegmentRun] = ()
    word_counts: dict[str, WordCounts] = field(default_factory=dict)
    _returned: frozenset[str] = field(init=False)
    _enters: dict[str, TensorLayout] = field(init=False, default_factory=dict)
    _last_used: list[set[str]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        # [block] the blocks whose outputs none after it takes, nor another stage, nor the loss
        later = {block for block in self.part.blocks if self.specs[block].loss}.union(*self.part.outputs.values())
        for block in reversed(self.part.blocks):
            self._last_used.insert(0, {block, *(source for source, _ in self.specs[block].inputs)} - later)
            later |= self._last_used[0]
        # blocks whose stages get gradients back by the plan
        self._returned = frozenset(name for source in self.part.returns for name in self.part.inputs[source])

    def run(self, step: ProgramStep, inputs: Received, samples: MiniBatch) -> Produced:
        """Run F, B, I or W, or a part of one; what each takes and gives is as below."""
        if step.action.role is Role.FORWARD:
            (own,) = step.samples
            received = dict(itertools.chain.from_iterable(inputs.values()))
            return {own: self.forward(own, received, samples, step.part or 0)}
        if step.action.role is Role.WEIGHT_GRAD:
            self.weight_gradients(step.action.microbatch)
            return {}
        given = {own: inputs.get(own, ()) for own in step.samples}
        if step.part is None:
            return self.backward(step.action.microbatch, given)
        names = {name for message, _ in step.gives for name in self.part.inputs[message.target]}
        return self.backward(step.action.microbatch, given, step.part, names)

    def forward(
        self, own: Numbers, received: Mapping[TensorKey, Tensor], samples: MiniBatch, part: int = 0
    ) -> dict[TensorKey, Tensor]:
        """Run the blocks on this rank's samples of a micro-batch or half; what leaves is returned detached, by block.

        Or those of a ``part``, and all that leaves so far. Autograd runs inside a part only, as inside a stage.

        Raises StageError where a block fails, or makes what needs a gradient that the plan does not bring, and, as all
        methods, TransferError where ranks that split a block lost each other.
        """
        returned, entering = self._returned, self._entering(map(_name, received))
        kept = {_name(key): self._kept(key, tensor, entering[_name(key)], len(own)) for key, tensor in received.items()}
        leaves = {name: _leaf(tensor, name in returned) for name, tensor in kept.items()}
        if part == 0:
            self._held[own] = _ForwardGraphs(leaves, _Values(self.layouts, len(own), leaves, entering))
        held = self._held[own]
        values = held.values
        assert values is not None, "parts run in order"
        if part:
            held.inputs |= leaves
            values.receive(leaves, entering)
        if self.segments and self.evaluating is self.inference:
            return self._run_segments(values, held, own, samples)
        begin, end = self._blocks_of(part)
        for number in range(begin, end):
            self._run_block(number, values, own, samples)
            values.let_go(self._last_used[number])
        return self._made(begin, end, values, held, own, samples)

    def _run_segments(
        self, values: _Values, held: _ForwardGraphs, own: Numbers, samples: MiniBatch
    ) -> dict[TensorKey, Tensor]:
        """Run the segments, each as a part of its own."""
        begin, found = 0, dict[TensorKey, Tensor]()
        for segment in self.segments:
            end = begin + len(segment.blocks)
            with segment.around():
                if segment.call is None:
                    for number in range(begin, end):
                        self._run_block(number, values, own, samples)
                else:
                    self._run_at_once(segment, segment.call, values, own, samples)
            values.let_go(set().union(*self._last_used[begin:end]))
            found = self._made(begin, end, values, held, own, samples)
            begin = end
        return found

    def _run_at_once(
        self, segment: SegmentRun, call: Callable[..., object], values: _Values, own: Numbers, samples: MiniBatch
    ) -> None:
        with stage_errors(f"blocks {_range(segment.blocks)}"):
            arguments = [values.taken(source, segment.blocks[0]) for source in segment.taken]
            arguments += [samples.rows(name, own) for name in segment.samples]
            at = next(iter(arguments), _ANYWHERE)
            _begin_random_numbers(samples.seed_of(segment.blocks[0], own), at.device)
            made = call(*arguments)
        tensors = made if isinstance(made, tuple) else (made,)
        for block, tensor in zip(segment.given, tensors, strict=True):
            if not isinstance(tensor, Tensor):
                raise StageError(f"block {block!r} returned {type(tensor).__name__}, and a block returns one tensor")
            values.put(block, tensor)

    def _made(
        self, begin: int, end: int, values: _Values, held: _ForwardGraphs, own: Numbers, samples: MiniBatch
    ) -> dict[TensorKey, Tensor]:
        """End a part of these blocks: what leaves so far is returned, and where its backward begins is held."""
        here = set(self.part.blocks[begin:end])
        names = dict.fromkeys(itertools.chain.from_iterable(self.part.outputs.values()))
        sliced = self.part.leaving
        outputs = {name: values.own(name) if name in sliced else values.whole(name) for name in names if name in here}
        self._require_way_back(outputs)
        loss = self._loss_of(self.part.blocks[begin:end], values, samples)
        ends = {name: get_gradient_edge(tensor) for name, tensor in outputs.items() if tensor.requires_grad}
        held.outputs |= {name: tensor.detach() for name, tensor in outputs.items() if name not in sliced}
        wanted = [(name, count) for name in outputs if name in sliced for count in sorted(sliced[name])]
        held.outputs |= {_key(*each): values.sliced(each[0], self._in_slices(each[1])) for each in wanted}
        last = end == len(self.part.blocks)
        held.graphs.append(_PartGraph(ends, {} if last else values.hand_on(self._taken_later(begin, end)), loss))
        found = held.outputs
        if last:
            held.values, held.outputs = None, {}
        if last and self.evaluating:
            del self._held[own]
        return found

    def _run_block(self, number: int, values: _Values, own: Numbers, samples: MiniBatch) -> None:
        """Run a block, with its parameters there."""
        block, again = self.part.blocks[number], self.part.again[number]
        if self.state is None:
            values.put(block, self._call(block, again, values, own, samples))
            return
        self.state.enter(number)
        made = self._call(block, again, values, own, samples)
        values.put(block, self.state.watch(number, made))
        self.state.leave(number)

    def _blocks_of(self, part: int) -> tuple[int, int]:
        """The first of its blocks, and the one after its last, by their places."""
        bounds = (0, *self.part.cuts, len(self.part.blocks))
        return bounds[part], bounds[part + 1]

    def _taken_later(self, begin: int, end: int) -> list[str]:
        """Those of the blocks whose outputs later parts take."""
        taken = {source for block in self.part.blocks[end:] for source, _ in self.specs[block].inputs}
        return [block for block in self.part.blocks[begin:end] if block in taken]

    def _loss_of(self, blocks: Sequence[str], values: _Values, samples: MiniBatch) -> Tensor | None:
        """The scaled loss of some blocks, which counts."""
        own_losses = [precise(values.whole(block)) for block in blocks if self.specs[block].loss]
        losses = [loss / samples.num_predictions for loss in own_losses]
        loss = torch.stack(losses).sum() if losses else None
        if self.part.counts_loss:
            self._add_loss(loss)
        return loss

    def backward(
        self, microbatch: int, gradients: Received, part: int | None = None, names: Iterable[str] | None = None
    ) -> Produced:
        """Gradients of what each forward received, by block; those of parameters add up, or wait for W where split.

        ``gradients`` are of the outputs of each of the micro-batch's forwards, known by its samples. Or those of a
        ``part``, which goes back through the blocks of one of forward's. ``names`` are the blocks whose gradients it
        gives, by default all that came. Raises StageError.
        """
        last = part is None or part == len(self.part.cuts)
        helds = {own: self._held.pop(own) if last else self._held[own] for own in gradients}
        for own, held in helds.items():
            held.gradients += [(_name(key), self._as_made(key, given, len(own))) for key, given in gradients[own]]
        blocks = slice(*self._blocks_of(len(self.part.cuts) - (part or 0)))
        with stage_errors(f"backward of its blocks {_range(self.part.blocks[blocks])}"):
            self._differentiate(microbatch, self._passes([*helds.values()]), last=last)
        returned = sorted(self._returned if names is None else names)  # all ranks gather slices in one order
        entering, counts = self._entering(returned), {name: self.part.returning.get(name, 1) for name in returned}
        return {
            own: {
                _key(name, count): self.layouts.converted(
                    name, _gradient(held.inputs[name]), entering[name], self._in_slices(count), len(own)
                )
                for name, count in counts.items()
            }
            for own, held in helds.items()
        }

    def _passes(self, helds: Sequence[_ForwardGraphs]) -> Iterator[Sequence[_Root]]:
        """Where backward begins: of each segment when those after it are done, with what its backend sets around it."""
        for segment in reversed(self.segments or (SegmentRun(()),)):
            with segment.around():
                yield [root for held in helds for root in _roots(held, self.loss_scale)]

    def _in_slices(self, count: int) -> TensorLayout:
        """Of so many slices of the sequence each device of the replica has one; 1: all of it."""
        return self.layouts.in_slices(count, len(self.part.group))

    def _as_made(self, key: TensorKey, gradient: Tensor, num_samples: int) -> Tensor:
        """The gradient of an output, as the block made that if it leaves in slices, else whole."""
        if key not in self.part.leaving:  # whole, or a slice like its own
            return gradient
        name = _name(key)
        return self.layouts.converted(name, gradient, WHOLE_TENSOR, self.layouts.given[name], num_samples)

    def _entering(self, names: Iterable[str]) -> dict[str, TensorLayout]:
        """How what the stage receives, by block, is kept for its own blocks."""
        return {name: self._enters.get(name) or self._enter(name) for name in names}

    def _enter(self, name: str) -> TensorLayout:
        """The same of one block, which is looked at once."""
        takers = [block for block in self.part.blocks if name in dict(self.specs[block].inputs)]
        found = self._enters[name] = self.layouts.entering(takers)
        return found

    def _kept(self, key: TensorKey, tensor: Tensor, layout: TensorLayout, num_samples: int) -> Tensor:
        """What is kept of a tensor that has come: all, or a slice as a tensor of its own."""
        if layout == WHOLE_TENSOR or key != _name(key):
            return tensor
        return self.layouts.converted(_name(key), tensor.detach(), WHOLE_TENSOR, layout, num_samples).contiguous()

    def weight_gradients(self, microbatch: int) -> None:
        """Work through what I left: the weight gradients of one micro-batch. Raises StageError."""
        with stage_errors(f"weight gradients of its blocks {_range(self.part.blocks)}"), self._exchanging(adds=True):
            self._queues.pop(microbatch).run()

    def _exchanging(self, *, adds: bool) -> AbstractContextManager[None]:
        """An action that goes back through blocks."""
        return nullcontext() if self.state is None else _goes_back(self.state, adds=adds)

    def _add_loss(self, loss: Tensor | None) -> None:
        if loss is not None:
            self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()

    @property
    def idle(self) -> bool:
        """Whether nothing is held: every forward has had its backward, every I its W."""
        return not self._held and not self._queues

    def take_loss(self) -> Tensor | None:
        """The scaled loss of the micro-batches since the last call; None if there is none or another rank has it."""
        loss, self.loss = self.loss, None
        return loss

    def _call(self, block: str, again: Again, values: _Values, own: Numbers, samples: MiniBatch) -> Tensor:
        spec, module, rows = self.specs[block], self.modules[block], self.layouts.rows(block, own)
        with stage_errors(f"block {block!r}"):
            arguments = [values.taken(source, block) for source, _ in spec.inputs]
            arguments += [self.layouts.sample(block, samples.rows(name, rows)) for name in spec.samples]
            at = next(itertools.chain(arguments, module.parameters()), _ANYWHERE)
            _begin_random_numbers(samples.seed_of(block, rows, self.part.piece), at.device)
            casting = self.autocast() if self.autocast is not None else nullcontext()
            with casting, nullcontext() if self.evaluating else counting(self.word_counts, block):
                run = partial(recomputed, module) if again is True else module
                selective = RecomputedCores() if again == "selective" else nullcontext()
                sharers = samples_shared(self.layouts.sharers(block))
                with selective as cores, sharers, self._reusing(block, values) as saved:
                    made = run(*arguments)
        if cores is not None and not cores.count and block in self.part.cores:
            raise StageError(
                f"block {block!r} is to recompute its attention core, and it never calls torch's "
                "scaled_dot_product_attention; search with --recompute none or all, or let the block call it"
            )
        if not isinstance(made, Tensor):
            raise StageError(f"block {block!r} returned {type(made).__name__}, and a block returns one tensor")
        if own_copy := next((copy for copy in saved if copy.holds(made)), None):
            values.saved[block] = own_copy
        if spec.loss:
            return self.layouts.summed(block, made)
        if len(rows) < len(own) and made.shape[:1] != (len(rows),):
            raise StageError(
                f"block {block!r} made {list(made.shape)} of {len(rows)} of {len(own)} samples, and only outputs with "
                "samples in their first dimension can be shared; leave samples out of its configuration"
            )
        return made

    @contextmanager
    def _reusing(self, block: str, values: _Values) -> Iterator[Sequence[KeptCopy]]:
        """When a block has run, let go of copies that are made again for backward; give what it saves, if that may be
        one of them later.
        """
        takes = [each for each in self.part.remade if each.target == block]
        gives = any(each.source == block and each.kept == AFTER for each in self.part.remade)
        if not takes and not gives:
            yield ()
            return
        copies = {each.source: values.copy_taken(each.source, block) for each in takes if each.kept != AFTER}
        with saving([*copies.values()], outputs=gives) as saved:
            yield saved
        for each in takes:
            if each.kept == AFTER:
                values.let_go_after(each.source, block)
            else:
                values.let_go_before(each.source, block, copies[each.source])

    def _differentiate(self, microbatch: int, passes: Iterable[Sequence[_Root]], *, last: bool) -> None:
        if not self.part.split:
            with self._exchanging(adds=True):
                for roots in passes:
                    _backward(roots)
            return
        queue = self._queues.setdefault(microbatch, WeightGradQueue())
        with queue, self._exchanging(adds=False):
            for roots in passes:
                _backward(roots)
        if last and not self._compared:
            self._compared = True
            self._compare_with_plan(queue.held_bytes)

    def _compare_with_plan(self, waiting: int) -> None:
        """Note if less than half of what the plan expects waits for W, on one rank of each replica.

        Plans do not say their number format, which shows in their parameters' bytes.
        """
        own = {each for module in self.modules.values() for each in module.parameters()}
        planned = self.part.parameter_bytes
        expected = self.part.waiting_bytes * (sum(each.nbytes for each in own) / planned if planned else 1.0)
        if self.autocast is not None:
            expected *= self.autocast.dtype.itemsize / torch.float32.itemsize
        if 2 * waiting < expected and self.part.place == 0:
            self.lack = (waiting, expected, f"stage {self.part.index} (blocks {_range(self.part.blocks)})")

    def _require_way_back(self, outputs: Mapping[str, Tensor]) -> None:
        """A tensor that needs a gradient must not leave for a stage from which the plan brings none back."""
        for target, names in self.part.outputs.items():
            for name in names:
                if name in outputs and outputs[name].requires_grad and target not in self.part.awaits:
                    raise StageError(
                        f"block {name!r} needs a gradient from stage {target}, and the plan brings none back; "
                        "profile this model and search again"
                    )


@contextmanager
def _goes_back(state: ExchangedState, *, adds: bool) -> Iterator[None]:
    """An action that goes back through blocks of a stage whose state is exchanged."""
    state.begin_backward(adds=adds)
    yield
    state.end_backward()


def _begin_random_numbers(seed: int, device: torch.device) -> None:
    """Seed the device's generator; ``torch.manual_seed`` would seed, or queue to seed, those of all others, too."""
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _name(key: TensorKey) -> str:
    return key if isinstance(key, str) else key[0]


def _key(name: str, count: int) -> TensorKey:
    return name if count == 1 else (name, count)


def _leaf(tensor: Tensor, with_gradient: bool) -> Tensor:
    """A tensor that starts a graph of its own; two stages may get the same one."""
    leaf = tensor.detach()
    return leaf.requires_grad_() if with_gradient and leaf.is_floating_point() else leaf


def _roots(held: _ForwardGraphs, loss_scale: float) -> list[_Root]:
    """Where the backward of a forward's last part begins, whose graph is done with it.

    At its outputs and its loss, and at what later parts took of it.
    """
    graph = held.graphs.pop()
    roots: list[_Root] = [(graph.outputs[name], given) for name, given in held.gradients if name in graph.outputs]
    roots += [(edge, leaf.grad) for edge, leaf in graph.handed.values() if leaf.grad is not None]
    if graph.loss is not None and graph.loss.requires_grad:
        roots.append((get_gradient_edge(graph.loss), torch.full_like(graph.loss, loss_scale)))
    return roots


def _gradient(leaf: Tensor) -> Tensor:
    """The leaf's gradient; zeros where nothing depends on it, for the other end awaits a tensor."""
    return leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)


def _backward(roots: Sequence[_Root]) -> None:
    if roots:
        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])


def _range(blocks: Sequence[str]) -> str:
    return repr(blocks[0]) if len(blocks) == 1 else f"{blocks[0]!r} to {blocks[-1]!r}"
