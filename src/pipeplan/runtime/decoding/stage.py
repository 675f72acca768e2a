"""A stage's blocks on one device, for passes of a group: of one word of each request, or of several of its prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.decoding.cached import BlockCaches, CachedRows, DecodingAttention
from pipeplan.runtime.decoding.exchanges import CountedCollectives, Form, SentBytes, StageExchange
from pipeplan.runtime.decoding.latents import LatentHeads
from pipeplan.runtime.decoding.layouts import BlockLayout, Placed, Route, positions, routes
from pipeplan.runtime.decoding.pieces import room_for
from pipeplan.runtime.decoding.requests import Pass
from pipeplan.runtime.executor.process_groups import ProcessGroups
from pipeplan.runtime.executor.stage import stage_errors
from pipeplan.runtime.launch.status import Progress
from pipeplan.runtime.models.shapes import output_shapes
from pipeplan.runtime.models.spec import CausalDecoder, Model, placed
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.experts import no_words
from pipeplan.runtime.parallel.sharding import Shards
from pipeplan.runtime.training.checkpoint import ParameterChunk
from pipeplan.runtime.training.weights import WeightNames, read_weights

Words = Callable[[Pass, range], Tensor]
"""The words [rows, width] that some rows of a pass enter."""


@dataclass(frozen=True)
class WrittenModel:
    """A model that writes on, for passes of every ``width``: its blocks have the same parameters in all of them."""

    widths: Mapping[int, Model]
    decoder: CausalDecoder

    @classmethod
    def of(cls, model: Model, chunk: int) -> WrittenModel:
        """Passes of one word and of ``chunk``. Raises UsageError where the model does not write on."""
        decoder = cls.require(model)
        return cls({width: decoder.placed(width) for width in sorted({1, chunk})}, decoder)

    @staticmethod
    def require(model: Model) -> CausalDecoder:
        """How the model writes on. Raises UsageError where it does not."""
        if model.decoder is None:
            raise UsageError(
                f"--prompt-file: {model.name} is not known to generate text token by token; take a causal language "
                "model (the zoo's GPTs, or a Hugging Face configuration such as LlamaConfig), in layers or halves of "
                "them"
            )
        return model.decoder

    @property
    def model(self) -> Model:
        """That of one word."""
        return self.widths[1]

    @property
    def chunk(self) -> int:
        """The most words of a prompt that enter at once."""
        return max(self.widths)

    def forms(self, dtype: torch.dtype) -> dict[int, dict[str, Form]]:
        """{width: {block: shape and format of what it makes of a row}}"""
        found = {width: output_shapes(model, 2, dtype) for width, model in self.widths.items()}
        return {width: {id_: (shape[1:], form) for id_, (shape, form) in of.items()} for width, of in found.items()}


def lines_of(stage: Placed) -> set[tuple[int, ...]]:
    """Sets of ranks that exchange something in a stage: all of it, and those along axes of its blocks."""
    found = {stage.devices}
    for number in range(len(stage.blocks)):
        layout = BlockLayout.of(stage, number)
        for device in range(len(stage.devices)):
            for line in (layout.line(device), layout.experts(device), layout.shards(device)):
                found.add(tuple(stage.devices[each] for each in line))
    return {line for line in found if len(line) > 1}


@dataclass(slots=True)
class _KnownPass:
    """What follows from the rows of a pass, found once for all blocks: by layout, and what they read of samples."""

    rows: Pass
    ranges: dict[BlockLayout, list[range]] = field(default_factory=dict)
    cached: dict[BlockLayout, CachedRows] = field(default_factory=dict)
    samples: dict[tuple[str, range], Tensor] = field(default_factory=dict)


@dataclass
class DecodingStage:
    """One device's end of a stage: modules, caches, and what it exchanges with the stage's other devices.

    ``words`` are those that rows enter, ``longest`` the most of a text, ``sizes`` [group] the slots of each;
    ``exchange`` is how the stage's devices exchange.
    """

    stage: Placed
    written: WrittenModel
    groups: ProcessGroups
    progress: Progress
    sent: SentBytes
    sizes: Sequence[int]
    longest: int
    words: Words
    dtype: torch.dtype = torch.float32
    seed: int = 0
    exchange: type[StageExchange] = StageExchange
    modules: dict[tuple[str, int], nn.Module] = field(init=False, default_factory=dict)
    shares: dict[str, Share] = field(init=False, default_factory=dict)
    caches: dict[tuple[str, int], BlockCaches] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.device = self.stage.devices.index(self.progress.rank)
        self.layouts = {id_: BlockLayout.of(self.stage, number) for number, id_ in enumerate(self.stage.blocks)}
        self._specs = {
            (id_, width): model.block(id_) for width, model in self.written.widths.items() for id_ in self.stage.blocks
        }
        self._forms = self.written.forms(self.dtype)
        self._mode = DecodingAttention()
        self._vocabulary: list[int] = []
        self._latents: dict[tuple[str, int], LatentHeads] = {}
        self._exchanges: dict[tuple[int, ...], StageExchange] = {}
        self._known: _KnownPass | None = None
        for id_ in self.stage.blocks:
            self._build(id_)

    # What comes from other stages, and goes there

    def rows_of(self, block: str, rows: Pass) -> list[range]:
        """[device] the rows of a pass that it has of the output of a block, or takes of one of another stage's."""
        if block not in self.layouts:
            block = next(id_ for id_ in self.stage.blocks if block in dict(self._specs[id_, 1].inputs))
        layout, known = self.layouts[block], self._of_pass(rows)
        if layout not in known.ranges:
            slots, total = rows.slots, self.sizes[rows.group]
            devices = range(len(self.stage.devices))
            known.ranges[layout] = [positions(slots, layout.slots(device, total)) for device in devices]
        return known.ranges[layout]

    def form(self, block: str, width: int) -> Form:
        """Shape and format of what a block makes of a row."""
        return self._forms[width][block]

    def run(self, rows: Pass, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A pass, of rows whose outputs of other stages' blocks were ``received``: what all blocks here made.

        Where none of the rows is this device's, tensors have none.
        """
        values = {source: (tensor, self.rows_of(source, rows)) for source, tensor in received.items()}
        with torch.inference_mode():
            for id_ in self.stage.blocks:
                self.sent.block = id_
                with stage_errors(f"block {id_!r}"):
                    made = self._run(id_, rows, values)
                values[id_] = made, self.rows_of(id_, rows)
        return {id_: values[id_][0] for id_ in self.stage.blocks}

    def logits(self, block: str, made: Tensor, rows: Pass) -> Tensor:
        """The logits of all words [own rows, words], of which devices have made those of some."""
        layout = self.layouts[block]
        line = layout.shards(self.device)
        if len(line) == 1 or not self.rows_of(block, rows)[self.device]:
            return made
        self.sent.block = block
        exchange = self._exchange(line)
        others = [device for device in line if device != self.device]
        if not self._vocabulary:  # how many each has: once
            own = {device: [torch.tensor([made.shape[1]])] for device in others}
            found = exchange.trade("sizes", own, {device: [((1,), torch.int64)] for device in others})
            self._vocabulary = [made.shape[1] if each == self.device else int(found[each][0]) for each in line]
        forms: dict[int, list[Form]] = {
            device: [((made.shape[0], count), made.dtype)]
            for device, count in zip(line, self._vocabulary, strict=True)
            if device != self.device
        }
        found = exchange.trade("logits", {device: [made] for device in others}, forms)
        return torch.cat([made if device == self.device else found[device][0] for device in line], dim=1)

    def _run(self, id_: str, rows: Pass, values: Mapping[str, tuple[Tensor, Sequence[range]]]) -> Tensor:
        spec, wanted = self._specs[id_, rows.width], self.rows_of(id_, rows)
        own = wanted[self.device]
        taken = [self._converted(source, *values[source], wanted, rows.width) for source, _ in spec.inputs]
        here = self._here(rows, self.layouts[id_])
        splits = here.layout.pieces.size > 1
        if not own and (here.is_idle if splits else not self._gets_words(id_, wanted)):
            shape, dtype = self.form(id_, rows.width)
            return torch.empty((0, *shape), dtype=dtype)
        if (
            not own
        ):  # pieces of caches, or experts, are for others' requests: a row stands in, whose results nobody takes
            taken = [each.new_zeros((1, *each.shape[1:])) for each in taken]
        samples = [self._sample(name, rows, own) for name in spec.samples]
        line = here.layout.line(self.device)
        exchange = self._exchange(line) if len(line) > 1 else None
        self._mode.begin(self._caches(id_, rows.group), here, exchange, self._latents.get((id_, rows.width)))
        with self._mode, contextlib.nullcontext() if own else no_words():
            made: Tensor = self.modules[id_, rows.width](*taken, *samples)
        return made[: len(own)]

    def _gets_words(self, id_: str, wanted: Sequence[range]) -> bool:
        """Whether devices that have rows share the block's experts with this one."""
        return bool(self.shares[id_].experts) and any(
            wanted[device] for device in self.layouts[id_].experts(self.device)
        )

    def _of_pass(self, rows: Pass) -> _KnownPass:
        if self._known is None or self._known.rows is not rows:
            self._known = _KnownPass(rows)
        return self._known

    def _here(self, rows: Pass, layout: BlockLayout) -> CachedRows:
        """The rows in a layout."""
        known = self._of_pass(rows).cached
        if layout not in known:
            known[layout] = CachedRows(rows, layout, self.device, self.sizes[rows.group])
        return known[layout]

    def _sample(self, name: str, rows: Pass, own: range) -> Tensor:
        """Words or positions of the own rows; of a row that stands in, zeros."""
        known = self._of_pass(rows).samples
        if (name, own) not in known:
            known[name, own] = self._made_sample(name, rows, own)
        return known[name, own]

    def _made_sample(self, name: str, rows: Pass, own: range) -> Tensor:
        if not own:
            return torch.zeros((1, rows.width), dtype=torch.long)
        if name == "tokens":
            return self.words(rows, own)
        of = rows.rows[own.start : own.stop]
        if rows.width == 1:
            return torch.tensor([[row.begin] for row in of])
        found = torch.zeros((len(own), rows.width), dtype=torch.long)
        for number, row in enumerate(of):
            found[number, rows.width - row.count :] = torch.arange(row.begin, row.begin + row.count)
        return found

    def _converted(
        self, source: str, tensor: Tensor, have: Sequence[range], want: Sequence[range], width: int
    ) -> Tensor:
        """A block's output with the rows that this device wants, of what devices have."""
        if have is want or list(have) == list(want):
            return tensor
        moves = routes(have, want, range(len(want)))
        if any(move.source != move.target for move in moves):
            return self._moved(source, tensor, have, moves, width)
        own, first = want[self.device], have[self.device].start
        return tensor[own.start - first : own.stop - first] if own else tensor[:0]

    def _moved(self, source: str, tensor: Tensor, have: Sequence[range], moves: Sequence[Route], width: int) -> Tensor:
        shape, dtype = self.form(source, width)
        first = have[self.device].start
        given: dict[int, list[Tensor]] = {}
        coming: dict[int, list[Form]] = {}
        order: list[tuple[int, int, Route]] = []
        for move in moves:
            if move.source == self.device != move.target:
                given.setdefault(move.target, []).append(tensor[move.begin - first : move.end - first])
            if move.target == self.device:
                forms = coming.setdefault(move.source, []) if move.source != self.device else []
                order.append((move.source, len(forms), move))
                forms.append(((move.end - move.begin, *shape), dtype))
        found = self._exchange(tuple(range(len(self.stage.devices)))).trade("rows", given, coming)
        parts = [
            tensor[move.begin - first : move.end - first] if origin == self.device else found[origin][number]
            for origin, number, move in order
        ]
        return torch.cat(parts) if parts else tensor[:0]

    def _exchange(self, line: tuple[int, ...]) -> StageExchange:
        if line not in self._exchanges:
            ranks = {device: self.stage.devices[device] for device in line}
            group = self.groups.of(tuple(ranks.values()))
            self._exchanges[line] = self.exchange(ranks, group, self.progress, self.sent)
        return self._exchanges[line]

    def _caches(self, id_: str, group: int) -> BlockCaches:
        """A block's caches of a group."""
        if (id_, group) not in self.caches:
            layout, decoder = self.layouts[id_], self.written.decoder
            shards = len(layout.shards(self.device))
            heads = None if decoder.key_heads is None else max(1, decoder.key_heads // shards)
            slots, window = layout.cached(self.device, self.sizes[group]), decoder.windows(id_)
            room = room_for(self.longest, window, self.written.chunk, layout.pieces.size)
            self.caches[id_, group] = BlockCaches(len(slots), room, heads, window)
        return self.caches[id_, group]

    # Building

    def read_weights(self, path: str) -> None:
        """Take the blocks' parameters, or this device's parts of them, from a file of weights. Raises UsageError."""
        model = self.written.model
        names = WeightNames.of(model, self.dtype)
        read_weights(path, names, model.name, self._held(names, model.parameter_shapes()))

    def _held(
        self, names: WeightNames, shapes: Mapping[tuple[str, str], tuple[int, ...]]
    ) -> Iterator[tuple[str, Sequence[ParameterChunk]]]:
        """Parts of a file's tensors that this device has, and where they begin there."""
        for id_ in self.stage.blocks:
            for own, tensor in self.modules[id_, 1].state_dict().items():
                if (id_, own) not in names.name_of:
                    continue
                whole = torch.Size(shapes.get((id_, own), tuple(tensor.shape)))
                places = self.written.model.part_of(self.shares[id_], own).places(tensor, whole)
                chunks = [ParameterChunk(whole, torch.Size(begin), piece) for begin, piece in places]
                yield names.name_of[id_, own], chunks

    def _build(self, id_: str) -> None:
        """Modules for all widths, with one set of parameters."""
        layout = self.layouts[id_]
        line, experts = (
            tuple(self.stage.devices[device] for device in of(self.device)) for of in (layout.shards, layout.experts)
        )
        share, rank = Share(id_), self.progress.rank
        if len(line) > 1:
            share = Share(id_, line.index(rank), line)
        elif len(experts) > 1 and self.written.model.require_shared_experts(id_, len(experts), 1):
            share = Share(id_, experts=experts, expert=experts.index(rank))
        shards = placed(share, self._along)
        self.shares[id_] = share
        for width, model in self.written.widths.items():
            made = model.build_share(share, self.seed, shards, dtype=self.dtype).eval()
            if width > 1:
                _take_parameters(made, self.modules[id_, 1])
            self.modules[id_, width] = made.requires_grad_(False)
            self._note_latent(id_, width)

    def _note_latent(self, id_: str, width: int) -> None:
        """How heads meet latents, where the block's attention caches these."""
        decoder = self.written.decoder
        names = self._specs[id_, width].names or {}
        own = [key for key, name in names.items() if decoder.latent and name.endswith(decoder.latent_weight)]
        if decoder.latent is not None and own:
            weight = self.modules[id_, width].get_parameter(own[0])
            self._latents[id_, width] = LatentHeads(weight, decoder.latent[1])

    def _along(self, line: tuple[int, ...]) -> Shards:
        counted = CountedCollectives(self.groups.of(line), len(line), self.sent)
        return Shards(len(line), line.index(self.progress.rank), counted)


def _take_parameters(module: nn.Module, other: nn.Module) -> None:
    """Let a module have the parameters of another that is made alike."""
    for name, parameter in other.named_parameters(remove_duplicate=False):
        path, _, own = name.rpartition(".")
        module.get_submodule(path).register_parameter(own, nn.Parameter(parameter.detach(), requires_grad=False))
