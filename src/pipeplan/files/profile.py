"""Profile: the file with a graph of blocks, what each costs, and where the numbers come from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import Field, PrivateAttr, model_validator

from pipeplan.errors import UsageError
from pipeplan.files.base import MIGRATIONS, Content, CurrentVersion, File, FileModel, Source, current_version, said_only
from pipeplan.files.placement import Placement
from pipeplan.files.recipe import CUSTOM, Recipe
from pipeplan.files.row_messages import RowMessages
from pipeplan.graphs import topological_order
from pipeplan.units import MAX_BYTES, bytes_of, ns_of
from pipeplan.workload.elements import Again, Bytes, Count, Index, Items, Name, Nanoseconds, Text
from pipeplan.workload.kinds import GRADIENTS, PARAMETERS, STATE_KINDS

TokensPerSample = Annotated[
    Count | None, Field(description="where samples are sequences of tokens; null where that is not known")
]
FlopsPerSample = Annotated[
    Annotated[int, Field(ge=1, le=10**21)] | None,
    Field(
        description="floating-point operations of the model's matrix products and convolutions in one forward, a "
        "multiply and an add being two; attention counts whole where it is causal, too; null where not known"
    ),
]
TRAINING: Final = "training"
INFERENCE: Final = "inference"
Mode = Literal["training", "inference"]
EAGER: Final = "eager"
"""The backend of every row that names none: torch as it runs operator by operator."""
Dimension = Annotated[int, Field(ge=1, le=1_000_000_000)]  # vocabularies go above a million


Change = Annotated[int, Field(ge=-MAX_BYTES, le=MAX_BYTES)]


class RingCosts(FileModel):
    """How much more than a row with gathered keys and values F and I take, and hold, where these go around a ring.

    Less where it is below 0.
    """

    forward_ns: Change = 0
    input_grad_ns: Change = 0
    workspace_bytes: Change = 0

    def __neg__(self) -> RingCosts:
        """How much more a row of a ring takes where they are gathered."""
        return RingCosts(**{name: -getattr(self, name) for name in RingCosts.model_fields})


TimeKey = Literal["forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns"]


class CostRow(FileModel):
    """Costs of one block for one micro-batch size, shard count (or configuration) and recomputation choice.

    Times are of one run on each device of the group. A row has ``backward_ns``, or ``input_grad_ns`` and
    ``weight_grad_ns``, or all three. ``activation_bytes`` are held from the start of F to the end of B or I,
    ``weight_grad_bytes`` from the end of I to the end of W, ``workspace_bytes`` while an action runs.

    In a profile of inference a row has only ``forward_ns``: ``activation_bytes`` are then what the block gives, held
    from the start of F to the end of the last F that takes it (to its own end where none does).

    With ``context`` c a device has one of c equal parts of each sample's sequence: a row is what it takes there, with
    what it waits for keys and values of the others, which are gathered before the attention core; ``ring`` says how
    much that changes where they go around a ring beside it instead.

    With ``expert`` e the block's experts are on e devices, each with whole ones of its own: a row has one device's
    words, those that choose its experts, and both exchanges of them. All other parts are split over ``shards``. Or each
    ``expert_shards`` neighbours of the e devices split the same experts, and exchange the words of all of these.

    With ``sequence_parallel`` the devices divide along the sequence what the block takes, keeps and gives outside of
    its split products (Korthikanti et al. 2022, section 4.2.2).

    A block with attention may say what it comes to where backward computes the attention core again (scores, softmax
    and their mixture; Korthikanti et al. 2022, section 5): B or I takes ``selective_ns`` longer, and
    ``selective_activation_bytes`` are held instead of ``activation_bytes``.

    Times have what the devices of a group wait for each other's messages, as it is where the row was made;
    ``messages`` say how much that is, and of what, so that it is known on other links, too.

    With a ``backend`` other than eager torch it is what the block takes where that runs it. Plans are made of eager's.
    Where backends were measured, times are of runs of the whole model, if there were any at this size.
    """

    microbatch_size: Annotated[Count, Field(description="samples in the micro-batch")]
    backend: Annotated[Name, said_only(EAGER, "what runs it: eager torch, or a kernel backend")] = EAGER
    shards: Annotated[Count, Field(description="devices that split the block")] = 1
    context: Annotated[
        Count,
        said_only(1, "devices (or groups of shards) that share the sequence of each sample, in equal parts"),
    ] = 1
    expert: Annotated[
        Count,
        said_only(1, "devices that share the block's experts, each with whole ones of its own"),
    ] = 1
    expert_shards: Annotated[
        Count,
        said_only(1, "how many neighbours of these devices split each expert"),
    ] = 1
    configuration: Annotated[Name | None, Field(description="named way of splitting, where there are several")] = None
    recompute: Annotated[bool, Field(description="costs with activation checkpointing of this block")] = False
    sequence_parallel: Annotated[
        bool,
        said_only(False, "devices hold slices of the sequence outside of split products; only with shards"),
    ] = False
    forward_ns: Nanoseconds
    backward_ns: Nanoseconds | None = None
    input_grad_ns: Nanoseconds | None = None
    weight_grad_ns: Nanoseconds | None = None
    activation_bytes: Bytes = 0
    weight_grad_bytes: Bytes = 0
    workspace_bytes: Bytes = 0
    selective_ns: Annotated[
        Nanoseconds | None,
        said_only(None, "more backward where the attention core is recomputed; null: it has none"),
    ] = None
    selective_activation_bytes: Annotated[
        Bytes | None,
        said_only(None, "held between forward and backward where the attention core is recomputed"),
    ] = None
    ring: Annotated[
        RingCosts | None,
        said_only(None, "more or less than that where keys and values go around a ring; only with context"),
    ] = None
    messages: Annotated[
        Index | None,
        said_only(
            None,
            "place in the profile's messages of what its devices send each other, which is part of the times; null: "
            "the row does not say",
        ),
    ] = None
    compile_ns: Annotated[
        Nanoseconds, said_only(0, "what a kernel backend took to build it, once, before it ran; in no other time")
    ] = 0
    alone: Annotated[
        dict[TimeKey, Nanoseconds],
        said_only({}, "times as they were measured alone, where the row's are of runs of the whole model"),
    ] = {}
    scaled: Annotated[
        bool,
        said_only(
            False,
            "no run of the whole model had it: times alone, made longer or shorter as those of others of its backend "
            "are in runs",
        ),
    ] = False
    repeats: Annotated[Index, Field(description="timed runs that each median is of; 0 if not measured")] = 0
    spread: Annotated[
        dict[
            TimeKey,
            Annotated[float, Field(ge=0)],
        ],
        Field(description="interquartile range divided by the median, per time"),
    ] = {}

    @model_validator(mode="after")
    def _is_one_case(self) -> CostRow:
        if (self.input_grad_ns is None) != (self.weight_grad_ns is None):
            raise ValueError("input_grad_ns and weight_grad_ns come together or not at all")
        if self.expert % self.expert_shards:
            raise ValueError(f"expert_shards {self.expert_shards} does not divide the {self.expert} devices of expert")
        if self.sequence_parallel and self.shards == 1:
            raise ValueError("sequence_parallel is of several shards, and shards is 1")
        if self.ring is not None:
            self._require_ring(self.ring)
        if (self.selective_ns is None) != (self.selective_activation_bytes is None):
            raise ValueError("selective_ns and selective_activation_bytes come together or not at all")
        if self.selective_activation_bytes is not None and self.selective_activation_bytes > self.activation_bytes:
            raise ValueError(
                f"selective_activation_bytes {self.selective_activation_bytes} are more than the activation_bytes "
                f"{self.activation_bytes} that are held where nothing is recomputed"
            )
        return self

    def _require_ring(self, ring: RingCosts) -> None:
        """Devices that share sequences have one, and what it takes less is no more than there is."""
        if self.context == 1:
            raise ValueError("ring is of devices that share sequences, and context is 1")
        if self.input_grad_ns is None:
            raise ValueError("ring says how much longer I is, and the row has no input_grad_ns")
        for key, less in (("forward_ns", ring.forward_ns), ("input_grad_ns", ring.input_grad_ns)):
            if (whole := getattr(self, key)) + less < 0:
                raise ValueError(f"ring.{key} is {less}, more below 0 than the row's {whole}")
        if self.workspace_bytes + ring.workspace_bytes < 0:
            raise ValueError(
                f"ring.workspace_bytes is {ring.workspace_bytes}, more below 0 than the row's {self.workspace_bytes}"
            )

    def taking(self, more: RingCosts) -> CostRow:
        """The row where F and I take so much more; a forward that backward runs again does, too."""
        again = more.forward_ns * self.recompute
        longer = {"forward_ns": more.forward_ns, "selective_ns": more.forward_ns}
        longer |= dict.fromkeys(("backward_ns", "input_grad_ns"), more.input_grad_ns + again)
        longer["workspace_bytes"] = more.workspace_bytes
        known = {key: own + longer[key] for key in longer if (own := getattr(self, key)) is not None}
        return self.model_copy(update=known)

    @property
    def has_backward(self) -> bool:
        """Whether it says how long backward takes, as every row of training does and none of inference."""
        return self.backward_ns is not None or self.input_grad_ns is not None

    @property
    def of_training(self) -> str | None:
        """A key that only training gives a meaning, where the row says one; None: it may be of inference."""
        keys = ("backward_ns", "input_grad_ns", "weight_grad_bytes", "selective_ns", "recompute")
        return next((key for key in keys if getattr(self, key) not in (None, False, 0)), None)

    @property
    def whole_backward_ns(self) -> int:
        """The full backward, where it was not measured as one its two halves; 0 where there is none."""
        halves = (self.input_grad_ns or 0) + (self.weight_grad_ns or 0)
        return halves if self.backward_ns is None else self.backward_ns

    @property
    def key(self) -> tuple[int, int, int, int, int, str | None, bool, str]:
        """What the row is for: micro-batch size, shards, context, expert and its shards, and so on to the backend."""
        split = self.shards, self.context, self.expert, self.expert_shards
        return (self.microbatch_size, *split, self.configuration, self.recompute, self.backend)


Parameters = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Trained = Annotated[Parameters, Field(description="how many that are trained, unsplit")]
ParameterBytes = Annotated[Bytes, Field(description="by the recipe custom, unsplit, frozen ones included")]
GradientBytes = Annotated[
    Bytes | None, Field(description="by the recipe custom, unsplit; null: as many as parameter_bytes")
]
MasterBytes = Annotated[Bytes, Field(description="by the recipe custom, unsplit: a copy that is updated")]
OptimizerBytes = Annotated[Bytes, Field(description="by the recipe custom, unsplit")]


class Parts(FileModel):
    """What says how many parameters it has, or by the recipe ``custom`` how many bytes training keeps of them.

    :func:`pipeplan.costs.recipes.state_of` has the bytes of both.
    """

    @property
    def stated(self) -> str | None:
        """A key that states bytes, which only the recipe ``custom`` has; None where there is none."""
        return next((kind.key for kind in STATE_KINDS if getattr(self, kind.key)), None)

    def without_bytes(self) -> Self:
        """The same, counted only."""
        nothing = {kind.key: type(self).model_fields[kind.key].default for kind in STATE_KINDS}
        return self.model_copy(update=nothing)


@cache
def _fields_but(model: type[FileModel], *left_out: str) -> Callable[[FileModel], Hashable]:
    """What reads all other fields."""
    return attrgetter(*(name for name in model.model_fields if name not in left_out))


Phase = Literal["prefill", "decode"]


class PhaseRow(FileModel):
    """What one block takes of inference with a cache, for so many requests whose texts are as long as each other.

    In ``prefill`` it takes all ``context_tokens`` of each, and caches what later ones need of them; in ``decode`` one
    token of each, which attends to ``context_tokens``, its own among them. Of ``forward_ns`` the attention
    core (scores, softmax and mixture, for which the cache is read) takes ``core_ns``, the rest does not depend on the
    cache. Collectives of ``shards`` are part of it. ``activation_bytes`` is what the block gives, ``workspace_bytes``
    what it needs beside that while it runs; the cache is in neither.

    With ``expert`` e the block's experts are on e devices, each of which has as many requests of its own.

    With ``dcp`` c the attention core is of one of c pieces of the caches of c times as many requests, those of a device
    and of the others that have pieces (decode context parallelism). What these exchange is packed, unpacked and merged
    in that time, but takes none on its way; ``by_queries``: of queries alone, and new keys and values for their keeper.
    """

    phase: Phase
    microbatch_size: Annotated[Count, Field(description="requests in the batch")]
    context_tokens: Annotated[Count, Field(description="tokens of each request's text, those of this step included")]
    shards: Annotated[Count, Field(description="devices that split the block")] = 1
    expert: Annotated[Count, said_only(1, "devices that share the block's experts, each with whole ones")] = 1
    dcp: Annotated[Count, said_only(1, "devices that have pieces of the same caches, split along their tokens")] = 1
    by_queries: Annotated[bool, said_only(False, "of these all get queries alone; only with dcp")] = False
    forward_ns: Nanoseconds
    core_ns: Annotated[Nanoseconds, said_only(0, "of these the attention core, which reads the cache")] = 0
    activation_bytes: Bytes = 0
    workspace_bytes: Bytes = 0
    repeats: Annotated[Index, said_only(0, "timed runs that each median is of; 0 if not measured")] = 0
    spread: Annotated[float, said_only(0.0, "interquartile range of forward_ns divided by its median", ge=0)] = 0.0

    @model_validator(mode="after")
    def _core_is_part(self) -> PhaseRow:
        if self.core_ns > self.forward_ns:
            raise ValueError(f"core_ns {self.core_ns} is part of forward_ns, and more than its {self.forward_ns}")
        if self.dcp > 1 and self.phase != "decode":
            raise ValueError(f"dcp {self.dcp} is of decode, not of {self.phase}")
        if self.by_queries and self.dcp == 1:
            raise ValueError("by_queries is of rows with dcp 2 or more")
        return self

    @property
    def key(self) -> tuple[str, int, int, int, int, int, bool]:
        """What the row is for: phase, tokens of the text, requests, shards, expert, dcp, by_queries."""
        case = self.shards, self.expert, self.dcp, self.by_queries
        return (self.phase, self.context_tokens, self.microbatch_size, *case)


class Block(Parts):
    """The smallest piece of the model that is placed.

    One with attention of a causal language model may say what inference caches of every token for those after it, and
    what its attention core takes and gives of one: of all heads, unsplit.
    """

    id: Name
    operator: Annotated[Name, Field(description="operator kind: attention, ffn, embedding, head, ...")]
    dimensions: Annotated[
        dict[Name, Dimension],
        Field(description="sizes a configuration can split: sequence, hidden, heads, vocabulary, ..."),
    ] = {}
    parameters: Trained = 0
    frozen_parameters: Annotated[Parameters, Field(description="how many that are not, unsplit")] = 0
    expert_parameters: Annotated[
        Parameters,
        said_only(0, "how many of both are its experts', which have rows of their own where devices share them"),
    ] = 0
    whole_parameters: Annotated[
        Parameters,
        said_only(0, "how many of parameters each of the shards that split the block has whole, such as its norms'"),
    ] = 0
    whole_frozen_parameters: Annotated[
        Parameters, said_only(0, "how many of frozen_parameters each of the shards has whole")
    ] = 0
    parameter_bytes: ParameterBytes = 0
    gradient_bytes: GradientBytes = None
    master_bytes: MasterBytes = 0
    optimizer_bytes: OptimizerBytes = 0
    shared: Annotated[bool, Field(description="spread over all devices by placements that know shared blocks")] = False
    modules: Annotated[
        Items[Name], said_only((), "of the model that it was taken from, those that it is: names such as layers.3.mlp")
    ] = ()
    costs: Annotated[Items[CostRow], Field(min_length=1)]
    cache_bytes_per_token: Annotated[
        Bytes, said_only(0, "what inference caches of a token: keys and values, or the latent of both")
    ] = 0
    cache_heads: Annotated[
        Count, said_only(1, "heads of these, of which a device that splits the block has its part, but at least one")
    ] = 1
    cache_window_tokens: Annotated[
        Count | None, said_only(None, "the most tokens that are looked back at, and so cached; null: all")
    ] = None
    query_bytes_per_token: Annotated[Bytes, said_only(0, "queries that meet the cache, of one token")] = 0
    mixture_bytes_per_token: Annotated[Bytes, said_only(0, "what attention makes of the cache for one token")] = 0
    phases: Annotated[
        Items[PhaseRow], said_only((), "costs of prefill and decode; only in a profile of inference")
    ] = ()

    @property
    def meaning(self) -> Hashable:
        """All that it says but for its names."""
        own = _fields_but(type(self), "id", "modules", "dimensions", "costs", "phases")
        of_phase = _fields_but(PhaseRow, "repeats", "spread")
        phases = list(map(of_phase, self.phases))
        return own(self), tuple(sorted(self.dimensions.items())), self.prices, tuple(phases)

    @property
    def prices(self) -> Hashable:
        """All that its costs say."""
        of_row = _fields_but(CostRow, "spread", "alone")
        return tuple(
            (of_row(row), *sorted(row.spread.items()), *sorted(row.alone.items())) if row.spread or row.alone
            else of_row(row)
            for row in self.costs
        )  # fmt: skip

    def rows(self, context: int = 1, expert: int = 1, expert_shards: int = 1) -> list[CostRow]:
        """Its costs with each sequence in ``context`` parts and ``expert`` devices sharing experts; by default neither.

        Of these devices ``expert_shards`` split each expert. A block that has no experts costs the same however many
        share those of others.
        """
        own = context, *((expert, expert_shards) if self.expert_parameters else (1, 1)), EAGER
        return [row for row in self.costs if (row.context, row.expert, row.expert_shards, row.backend) == own]

    @classmethod
    def of(
        cls,
        id: str,
        forward: str | float,
        backward: str | float | None = None,
        *,
        input_grad: str | float | None = None,
        weight_grad: str | float | None = None,
        activation: str | int = 0,
        weight_grad_bytes: str | int = 0,
        workspace: str | int = 0,
        parameters: str | int = 0,
        gradients: str | int | None = None,
        master: str | int = 0,
        optimizer: str | int = 0,
        trained: int = 0,
        frozen: int = 0,
        microbatch_size: int = 1,
        operator: str = "block",
        shared: bool = False,
    ) -> Block:
        """A block with costs for one micro-batch size, in a line of Python.

        Times are text with a unit or seconds, sizes text with a unit or bytes: ``Block.of("layer0", "1ms", "2ms",
        activation="64MB")``. ``parameters``, ``gradients`` (None: as large), ``master`` and ``optimizer`` are bytes,
        for a profile with the recipe ``custom``; ``trained`` and ``frozen`` count parameters, for one with another. For
        several sizes or shard counts make :class:`Block` of a :class:`CostRow` for each.

        Without a ``backward`` it is for a profile of inference (``Profile.of(..., mode="inference")``), in which blocks
        that state bytes say ``gradients=0``.

        Raises:
            UsageError: a time or a size is none.
            ValueError: one of ``input_grad`` and ``weight_grad`` without the other.
        """
        row = CostRow(
            microbatch_size=microbatch_size,
            forward_ns=ns_of(forward),
            backward_ns=None if backward is None else ns_of(backward),
            input_grad_ns=None if input_grad is None else ns_of(input_grad),
            weight_grad_ns=None if weight_grad is None else ns_of(weight_grad),
            activation_bytes=bytes_of(activation),
            weight_grad_bytes=bytes_of(weight_grad_bytes),
            workspace_bytes=bytes_of(workspace),
        )
        return cls(
            id=id,
            operator=operator,
            parameters=trained,
            frozen_parameters=frozen,
            parameter_bytes=bytes_of(parameters),
            gradient_bytes=None if gradients is None else bytes_of(gradients),
            master_bytes=bytes_of(master),
            optimizer_bytes=bytes_of(optimizer),
            shared=shared,
            costs=(row,),
        )

    @model_validator(mode="after")
    def _rows_are_unique(self) -> Block:
        seen: dict[object, int] = {}
        for index, row in enumerate(self.costs):
            if row.key in seen:
                raise ValueError(
                    f"costs[{index}] is for the same case as costs[{seen[row.key]}]: "
                    f"microbatch_size {row.microbatch_size}, shards {row.shards}, "
                    f"{f'context {row.context}, ' if row.context > 1 else ''}"
                    f"{f'expert {row.expert}, ' if row.expert > 1 else ''}"
                    f"{f'expert_shards {row.expert_shards}, ' if row.expert_shards > 1 else ''}"
                    f"recompute {row.recompute}"
                    f"{f', backend {row.backend}' if row.backend != EAGER else ''}"
                )
            seen[row.key] = index
            if row.expert > 1 and not self.expert_parameters:
                raise ValueError(f"costs[{index}] has expert {row.expert}, and the block has no expert_parameters")
        cases: dict[object, int] = {}
        for index, phase in enumerate(self.phases):
            if (before := cases.setdefault(phase.key, index)) != index:
                raise ValueError(
                    f"phases[{index}] is for the same case as phases[{before}]: {phase.phase} of "
                    f"{phase.microbatch_size} requests with context_tokens {phase.context_tokens} on {phase.shards} "
                    "shards"
                )
        if self.expert_parameters > self.parameters + self.frozen_parameters:
            raise ValueError(
                f"expert_parameters {self.expert_parameters} are more than the "
                f"{self.parameters + self.frozen_parameters} parameters of the block"
            )
        for key in ("parameters", "frozen_parameters"):
            if (whole := getattr(self, f"whole_{key}")) > (own := getattr(self, key)):
                raise ValueError(f"whole_{key} {whole} are more than the {own} {key} of the block")
        return self


Saved = Literal["no", "again", "yes"]
SavedBySource = Literal["no", "core", "yes"]
NEEDS: tuple[Saved, ...] = ("no", "again", "yes")
COUNTS: tuple[SavedBySource, ...] = ("no", "core", "yes")
"""Both from the least to the most."""


class Edge(FileModel):
    """A tensor that one block hands to another.

    Edges from one source with the same ``tensor`` carry the same: it goes to each stage once, and a stage with several
    blocks that take it holds it once. Without a name every edge has a tensor of its own.

    The target's row counts what it takes among ``activation_bytes`` where that has a gradient, and where ``saved`` says
    that its backward needs it; the source's row counts what it gives where ``saved_by_source`` says so. A stage with
    both ends holds the tensor once where any of its blocks needs it, and else not: it is there while they run, which
    the target's ``workspace_bytes`` count. One that has the target alone keeps what a gradient goes back for.
    """

    source: Name
    target: Name
    tensor: Annotated[Name | None, Field(description="which of the source's tensors, where blocks share one")] = None
    bytes_per_sample: Annotated[Bytes, Field(description="size for one sample; the gradient has the same")] = 0
    transfer_ns: Annotated[
        Nanoseconds | None, Field(description="fixed latency that overrides the cluster and occupies no link")
    ] = None
    gradient: Annotated[bool, Field(description="whether a gradient flows back")] = True
    broadcast: Annotated[bool, Field(description="one tensor for all samples instead of a slice for each")] = False
    saved: Annotated[
        Saved | None,
        said_only(
            None,
            "whether the target's backward needs it, or its forward once more where that is computed again; null: it "
            "does if it gives a gradient for it, else only again",
        ),
    ] = None
    saved_by_source: Annotated[
        SavedBySource,
        said_only("no", "whether the source's backward needs it, too; core: where it does not recompute its attention"),
    ] = "no"

    @property
    def need(self) -> Saved:
        """Whether the target's backward needs it."""
        return self.saved or ("yes" if self.gradient else "again")

    def is_saved(self, again: Again = False) -> bool:
        """Whether the backward of a target that runs so needs it."""
        return self.need == "yes" or (again is True and self.need == "again")

    def is_counted(self, again: Again = False) -> bool:
        """Whether the rows of a target that runs so count it as held: of what is computed again all that it takes."""
        return self.gradient or again is True or self.need == "yes"

    def is_counted_by_source(self, again: Again = False) -> bool:
        """Whether the rows of a source that runs so count it."""
        if again is True:
            return False
        return self.saved_by_source == "yes" or (self.saved_by_source == "core" and again != "selective")

    @property
    def key(self) -> Hashable:
        """Equal for edges that carry the same tensor, and no others."""
        return (self.source, self.target) if self.tensor is None else (self.source, None, self.tensor)


class TiedParameter(Parts):
    """A parameter that several blocks share: each counts it as its own, a device that has several of them has it once.

    It is trained, and its gradients are summed over all copies: frozen parameters are each block's own. Where nothing
    is counted it is not known: of version 1 only the blocks are.
    """

    name: Name
    blocks: Annotated[Items[Name], Field(min_length=2, description="those that share it, which all count it")]
    parameters: Trained = 0
    parameter_bytes: ParameterBytes = 0
    gradient_bytes: GradientBytes = None
    master_bytes: MasterBytes = 0
    optimizer_bytes: OptimizerBytes = 0

    @property
    def frozen_parameters(self) -> int:
        """None: see above."""
        return 0


class BackendFusion(FileModel):
    """Blocks that a kernel backend runs at once, and what that takes: a row for each backend and micro-batch size."""

    blocks: Annotated[Items[Name], Field(min_length=2, description="in the order in which they run")]
    costs: Annotated[Items[CostRow], Field(min_length=1)]


class BackendRefusal(FileModel):
    """Blocks that a kernel backend does not run, or runs wrongly, at a micro-batch size; and why."""

    blocks: Annotated[Items[Name], Field(min_length=1)]
    backend: Name
    microbatch_size: Count
    reason: Text


class RunGroup(FileModel):
    """Blocks that a kernel backend ran at once in a run of the whole model, and what that took."""

    blocks: Annotated[Items[Name], Field(min_length=1)]
    backend: Name
    forward_ns: Nanoseconds = 0
    backward_ns: Annotated[Nanoseconds, said_only(0, "of training")] = 0


class WholeRun(FileModel):
    """Runs of the whole model, group by group as a cover has it; or why it did not run."""

    microbatch_size: Count
    groups: Annotated[Items[RunGroup], Field(min_length=1)]
    reason: Annotated[Text, said_only("", "why it does not run, or what was wrong")] = ""

    @property
    def ns(self) -> int:
        """What a run takes."""
        return sum(each.forward_ns + each.backward_ns for each in self.groups)

    @property
    def cover(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        """Its groups, each with its backend."""
        return tuple((each.blocks, each.backend) for each in self.groups)

    @property
    def backends(self) -> frozenset[str]:
        """All that run groups of it."""
        return frozenset(each.backend for each in self.groups)


@dataclass(frozen=True, slots=True)
class KernelRows:
    """Rows of kernel backends other than eager torch, by blocks in their order, and ns of a change of backend."""

    rows: Mapping[tuple[str, ...], tuple[CostRow, ...]]
    change_ns: int = 0

    def row(self, blocks: Sequence[str], size: int, backend: str) -> CostRow | None:
        """That of a group, whole on one device, with nothing recomputed; None where it was not measured."""
        key = (size, 1, 1, 1, 1, None, False, backend)
        return next((row for row in self.rows.get(tuple(blocks), ()) if row.key == key), None)


_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MEANT: dict[tuple[str, float | None], Content] = {
    ("float32", 2): {"name": "fp32"},
    ("float32", 1): {"name": "fp32", "optimizer": "momentum"},
    ("bfloat16", 2): {"name": "bf16"},
    ("bfloat16", 1): {"name": "bf16", "optimizer": "momentum"},
    ("bfloat16", 6): {"name": "bf16-mixed", "gradient_dtype": "bf16"},
    ("float16", 6): {"name": "fp16-mixed"},
}
"""Recipes in which gradients take what parameters take, by number format and bytes of all other state over these."""


def _ratio(own: int, rest: int) -> float | None:
    """Bytes of other state over those of parameters; infinite beyond all floats, which is refused later."""
    try:
        return rest / own if own else None
    except OverflowError:
        return math.inf


def _recipe_is_named(profile: Content) -> Content:
    """Version 2: blocks count parameters and the profile names the recipe that their bytes meant, if that is one."""
    dtype, blocks = profile["source"]["dtype"], profile["blocks"]
    sizes = [(block["parameter_bytes"], block["optimizer_bytes"]) for block in blocks]
    ratios = {_ratio(own, rest) for own, rest in sizes if own or rest}
    (ratio,) = ratios if len(ratios) == 1 else (None,)
    meant, width = _MEANT.get((dtype, ratio)), _DTYPES.get(dtype, 1)
    if meant is None or any(own % width for own, _ in sizes):
        return profile
    counted = [
        {key: value for key, value in block.items() if key not in ("parameter_bytes", "optimizer_bytes")}
        | {"parameters": block["parameter_bytes"] // width}
        for block in blocks
    ]
    return profile | {"blocks": counted, "recipe": meant}


def _tied_parameters_have_bytes(profile: Content) -> Content:
    """Version 2: blocks no longer name their group of tied parameters, the profile has a list of these."""
    groups: dict[str, list[str]] = {}
    blocks = []
    for block in profile["blocks"]:
        if block["tied"] is not None:
            groups.setdefault(block["tied"], []).append(block["id"])
        blocks.append({key: value for key, value in block.items() if key != "tied"})
    tied = [{"name": name, "blocks": ids} for name, ids in groups.items() if len(set(ids)) > 1]
    return profile | {"blocks": blocks, "tied": tied}


MIGRATIONS["profile", 1] = lambda profile: _recipe_is_named(_tied_parameters_have_bytes(profile))

Made = TypeVar("Made")


class Profile(File):
    """A model as blocks and edges with their costs. Edges form a directed acyclic graph."""

    schema_version: Annotated[int, CurrentVersion("profile")] = current_version("profile")
    kind: Literal["profile"] = "profile"
    name: Name
    mode: Annotated[
        Mode,
        said_only(TRAINING, "what its costs are of: training, or inference, whose rows have forwards alone"),
    ] = TRAINING
    source: Source
    tokens_per_sample: TokensPerSample = None
    forward_flops_per_sample: FlopsPerSample = None
    recipe: Annotated[Recipe, Field(description="what training keeps of every parameter")] = Recipe()
    step_bytes_per_s: Annotated[
        int | None,
        said_only(
            None,
            "bytes of state that the optimizer's step reads and writes per second; null: its time is not known, and "
            "left out",
            ge=1,
            le=MAX_BYTES,
        ),
    ] = None
    launch_overhead_ns: Annotated[
        Nanoseconds,
        said_only(0, "what launching a block takes the host, for each of its actions, beside what its rows say"),
    ] = 0
    blocks: Annotated[Items[Block], Field(min_length=1)]
    edges: Items[Edge] = ()
    tied: Annotated[Items[TiedParameter], Field(description="parameters that blocks share")] = ()
    messages: Annotated[
        Items[RowMessages], said_only((), "what devices send each other inside of groups, for rows that name the place")
    ] = ()
    placement: Annotated[Placement | None, Field(description="used as it is unless another is asked for")] = None
    keep_together: Annotated[
        Items[Annotated[Items[Name], Field(min_length=2)]],
        said_only((), "groups of blocks that no stage has without the rest of their group"),
    ] = ()
    fusions: Annotated[
        Items[BackendFusion], said_only((), "groups of blocks that kernel backends run at once, with their costs")
    ] = ()
    backend_change_ns: Annotated[
        Nanoseconds, said_only(0, "what it takes to hand a result to a block that another kernel backend runs")
    ] = 0
    refusals: Annotated[
        Items[BackendRefusal], said_only((), "what kernel backends do not run, or ran wrongly, when it was measured")
    ] = ()
    whole_runs: Annotated[
        Items[WholeRun], said_only((), "covers by which the whole model has run, in the order of these runs")
    ] = ()
    _of_kinds: dict[str, Profile] = PrivateAttr(default_factory=dict)
    _rings: frozenset[tuple[int, int]] = PrivateAttr(default_factory=frozenset)
    _kernels: KernelRows | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _is_a_graph(self) -> Profile:
        ids: dict[str, int] = {}
        for index, block in enumerate(self.blocks):
            if block.id in ids:
                raise ValueError(f"blocks[{index}].id {block.id!r} is already the id of blocks[{ids[block.id]}]")
            ids[block.id] = index
        pairs: set[tuple[str, str, str | None]] = set()
        tensors: dict[tuple[str, str], tuple[int, Edge]] = {}
        for index, edge in enumerate(self.edges):
            for end in (edge.source, edge.target):
                if end not in ids:
                    raise ValueError(f"edges[{index}] names {end!r}, which is not a block")
            if edge.source == edge.target:
                raise ValueError(f"edges[{index}] joins {edge.source!r} to itself")
            if (edge.source, edge.target, edge.tensor) in pairs:
                raise ValueError(f"edges[{index}] repeats the edge {edge.source!r} -> {edge.target!r}")
            pairs.add((edge.source, edge.target, edge.tensor))
            if edge.tensor is not None:
                first, known = tensors.setdefault((edge.source, edge.tensor), (index, edge))
                if (edge.bytes_per_sample, edge.broadcast) != (known.bytes_per_sample, known.broadcast):
                    raise ValueError(
                        f"edges[{index}] and edges[{first}] carry tensor {edge.tensor!r} of {edge.source!r} in "
                        "different sizes"
                    )
                if edge.saved_by_source != known.saved_by_source:
                    raise ValueError(
                        f"edges[{index}] and edges[{first}] carry tensor {edge.tensor!r} of {edge.source!r}, and say "
                        "different things of saved_by_source"
                    )
        self._require_mode()
        self._require_counts()
        self._require_tied(ids)
        self._require_groups(ids)
        self._require_fusions(ids)
        order = self.topological_order()
        if self.placement is not None:
            self.check_placement(self.placement, order)
        return self

    @property
    def is_inference(self) -> bool:
        """Whether it is of forwards alone."""
        return self.mode == INFERENCE

    def _require_mode(self) -> None:
        """All rows are of training, or all of inference, and name messages that are there; inference keeps parameters
        alone."""
        for index, block in enumerate(self.blocks):
            for number, row in enumerate(block.costs):
                place = f"blocks[{index}].costs[{number}]"
                if row.messages is not None and row.messages >= len(self.messages):
                    raise ValueError(
                        f"{place}.messages is {row.messages}, and the profile's messages are {len(self.messages)}"
                    )
                if not self.is_inference and not row.has_backward:
                    raise ValueError(
                        f"{place}: give backward_ns, or input_grad_ns and weight_grad_ns; or mode {INFERENCE!r}, in "
                        "which no block has a backward"
                    )
                if self.is_inference and (key := row.of_training) is not None:
                    raise ValueError(f"{place} states {key}, which the mode {INFERENCE!r} does not have; leave it out")
            if not self.is_inference and (block.phases or block.cache_bytes_per_token):
                key = "phases" if block.phases else "cache_bytes_per_token"
                raise ValueError(f"blocks[{index}] states {key}, which only the mode {INFERENCE!r} has; leave it out")
        if self.is_inference and self.step_bytes_per_s is not None:
            raise ValueError(f"step_bytes_per_s is of the optimizer, which the mode {INFERENCE!r} does not have")
        for place, parts in (("blocks", self.blocks), ("tied", self.tied)):
            for index, part in enumerate(parts if self.is_inference and self.recipe.is_custom else ()):
                kept = {kind: getattr(part, kind.key) for kind in STATE_KINDS}
                if kept[GRADIENTS] is None and kept[PARAMETERS]:
                    raise ValueError(
                        f"{place}[{index}] leaves gradient_bytes open, which means as many as parameter_bytes; the "
                        f"mode {INFERENCE!r} keeps none: state gradient_bytes 0"
                    )
                if any(size for kind, size in kept.items() if kind is not PARAMETERS):
                    raise ValueError(
                        f"{place}[{index}] states bytes of gradients, master copies or an optimizer, and the mode "
                        f"{INFERENCE!r} keeps parameters alone"
                    )

    def _require_counts(self) -> None:
        """Bytes are stated where the recipe does not say them."""
        for place, parts in (("blocks", self.blocks), ("tied", self.tied)):
            for index, part in enumerate(parts if not self.recipe.is_custom else ()):
                if part.stated is not None:
                    raise ValueError(
                        f"{place}[{index}] states {part.stated}, which the recipe {self.recipe.name!r} says already; "
                        f"give parameters, or the recipe {CUSTOM!r}"
                    )

    def _require_groups(self, place_of: dict[str, int]) -> None:
        """Blocks that are kept together are there, each in one group."""
        group_of: dict[str, int] = {}
        for index, group in enumerate(self.keep_together):
            for id_ in group:
                if id_ not in place_of:
                    raise ValueError(f"keep_together[{index}] names {id_!r}, which is not a block")
                if id_ in group_of:
                    raise ValueError(f"keep_together[{index}] names {id_!r}, which keep_together[{group_of[id_]}] has")
                group_of[id_] = index

    def _require_fusions(self, place_of: Mapping[str, int]) -> None:
        """Groups that backends run, or refuse, are of blocks that are there, and whole runs have all; their rows are of
        the profile's mode."""
        named = [(f"fusions[{index}]", each.blocks) for index, each in enumerate(self.fusions)]
        named += [(f"refusals[{index}]", each.blocks) for index, each in enumerate(self.refusals)]
        for index, run in enumerate(self.whole_runs):
            count = Counter(id_ for group in run.groups for id_ in group.blocks)
            named.append((f"whole_runs[{index}]", tuple(count)))
            if odd := next((id_ for id_ in place_of if count[id_] != 1), None):
                raise ValueError(f"whole_runs[{index}] has {odd!r} {count[odd]} times, and a run has each block once")
        for place, blocks in named:
            if unknown := next((id_ for id_ in blocks if id_ not in place_of), None):
                raise ValueError(f"{place} names {unknown!r}, which is not a block")
        seen: dict[Hashable, str] = {}
        for index, fusion in enumerate(self.fusions):
            for number, row in enumerate(fusion.costs):
                place = f"fusions[{index}].costs[{number}]"
                if self.is_inference == row.has_backward:
                    raise ValueError(f"{place}: a row of the mode {self.mode!r} has {'no ' * row.has_backward}backward")
                case = frozenset(fusion.blocks), row.key
                if seen.setdefault(case, place) != place:
                    raise ValueError(f"{place} is for the same case as {seen[case]}")

    def _require_tied(self, place_of: dict[str, int]) -> None:
        """Tied parameters name blocks, each once, that count as much; ``place_of`` are the blocks by id."""
        names: set[str] = set()
        keys = ("parameters", *(kind.key for kind in STATE_KINDS))
        left = {block.id: {key: getattr(block, key) or 0 for key in keys} for block in self.blocks}
        for index, each in enumerate(self.tied):
            if each.name in names or len(set(each.blocks)) < len(each.blocks):
                raise ValueError(f"tied[{index}] {each.name!r} names a block twice, or has the name of another")
            names.add(each.name)
            for id_ in each.blocks:
                if id_ not in place_of:
                    raise ValueError(f"tied[{index}] names {id_!r}, which is not a block")
                block = self.blocks[place_of[id_]]
                for key in keys:
                    left[id_][key] -= getattr(each, key) or 0
                    if left[id_][key] >= 0:
                        continue
                    if key == "parameters" and block.frozen_parameters >= -left[id_][key]:
                        raise ValueError(
                            f"tied[{index}] {each.name!r} has {each.parameters} parameters, of which block {id_!r} "
                            f"trains only {block.parameters}: it has {block.frozen_parameters} frozen ones, and what "
                            "is tied is trained; leave frozen parameters out of tied, or count them as parameters"
                        )
                    raise ValueError(
                        f"tied[{index}] {each.name!r} has {key} {getattr(each, key)}; with the parameters tied before "
                        f"it that is more than block {id_!r} counts, {getattr(block, key) or 0}"
                    )

    @classmethod
    def of(
        cls,
        name: str,
        blocks: Iterable[Block],
        *,
        edges: Iterable[Edge | tuple[str, str]] | None = None,
        bytes_per_sample: str | int = 0,
        placement: Placement | None = None,
        source: Source | None = None,
        recipe: str | Recipe = CUSTOM,
        mode: Mode = TRAINING,
    ) -> Profile:
        """A profile of these blocks, in a few lines of Python.

        Example::

            layers = [Block.of(f"layer{n}", "1ms", "2ms", activation="64MB") for n in range(8)]
            profile = Profile.of("my-model", layers, bytes_per_sample="4MB")

        Args:
            name: of the model.
            blocks: in the order in which they run.
            edges: what takes whose output, as :class:`Edge` or (source, target); by default each block that of the one
                before.
            bytes_per_sample: of the tensors on edges that are pairs, as text with a unit or bytes.
            placement: used as it is unless another is asked for.
            source: where the numbers came from; by default they are called estimated.
            recipe: what training keeps of the parameters that blocks count; by default blocks state bytes.
            mode: ``training``, or ``inference`` of blocks without a backward.

        Raises:
            UsageError: ``bytes_per_sample`` is no size.
            ValueError: a block is there twice, an edge names none, or edges have a cycle.
        """
        known, size = tuple(blocks), bytes_of(bytes_per_sample)
        pairs = zip([each.id for each in known], [each.id for each in known[1:]], strict=False)
        made = tuple(
            edge if isinstance(edge, Edge) else Edge(source=edge[0], target=edge[1], bytes_per_sample=size)
            for edge in (pairs if edges is None else edges)
        )
        source = source or Source(method="estimated", notes="Made in Python.")
        recipe = Recipe(name=recipe) if isinstance(recipe, str) else recipe
        how: dict[str, Any] = {"mode": mode, "recipe": recipe, "placement": placement}
        return cls(name=name, source=source, blocks=known, edges=made, **how)

    @property
    def of_eager(self) -> Profile:
        """What is planned with: blocks have rows of eager torch alone, and :attr:`kernels` those of other backends.

        It is the same file, as its fingerprint says.

        Raises:
            UsageError: a block has no such row.
        """
        rows_are_eager = all(row.backend == EAGER for block in self.blocks for row in block.costs)
        if rows_are_eager and not (self.fusions or self.refusals or self.whole_runs):
            return self
        blocks = []
        for block in self.blocks:
            rows = tuple(row for row in block.costs if row.backend == EAGER)
            if not rows:
                raise UsageError(
                    f"block {block.id!r} has no row of eager torch, of which plans are made; profile it again, or add "
                    "one"
                )
            blocks.append(block.model_copy(update={"costs": rows}))
        none: dict[str, Any] = {"fusions": (), "refusals": (), "whole_runs": (), "backend_change_ns": 0}
        plain = self.model_copy(update={"blocks": tuple(blocks), **none})
        plain = plain.with_kinds(self.of_kinds)
        plain._kernels = self.kernels
        return plain.read_as(self.fingerprint)

    @property
    def kernels(self) -> KernelRows | None:
        """The rows of kernel backends, also where blocks have those of eager torch alone; None: there are none."""
        if self._kernels is not None:
            return self._kernels
        rows: dict[tuple[str, ...], list[CostRow]] = {}
        for block in self.blocks:
            if own := [row for row in block.costs if row.backend != EAGER]:
                rows[block.id,] = own
        for fusion in self.fusions:
            rows.setdefault(fusion.blocks, []).extend(fusion.costs)
        if not rows:
            return None
        return KernelRows({blocks: tuple(own) for blocks, own in rows.items()}, self.backend_change_ns)

    def without_kernels(self) -> Profile:
        """The same without what kernel backends take, where blocks have rows of eager torch alone."""
        copied = self.model_copy()
        copied._kernels = None
        return copied

    @property
    def groups_by_backend(self) -> dict[str, int]:
        """{kernel backend: how many blocks and groups of blocks it has times for}, but for eager torch."""
        of_blocks = [{row.backend for row in block.costs} for block in self.blocks]
        found = Counter(name for names in of_blocks for name in names if name != EAGER)
        found.update(name for fusion in self.fusions for name in {row.backend for row in fusion.costs})
        return dict(sorted(found.items()))

    @property
    def of_kinds(self) -> Mapping[str, Profile]:
        """{kind of device: the profile of the same model on it}, of those that have one of their own; in no file."""
        return self._of_kinds

    def with_kinds(self, profiles: Mapping[str, Profile]) -> Profile:
        """The same file beside those of some kinds of devices, as :func:`pipeplan.costs.kinds.for_kinds` checks."""
        copied = self.model_copy()
        copied._of_kinds = dict(profiles)
        copied.__dict__.pop("made_once", None)
        return copied

    @property
    def rings(self) -> frozenset[tuple[int, int]]:
        """The (shards, context) whose rows are those of rings, as :mod:`pipeplan.costs.context` chose; in no file."""
        return self._rings

    def with_rings(self, rings: Iterable[tuple[int, int]]) -> Profile:
        """Note that these have them."""
        copied = self.model_copy()
        copied._rings = frozenset(rings)
        return copied

    @cached_property
    def made_once(self) -> dict[Hashable, Any]:
        """{key: what :meth:`once` has made}"""
        return {}

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What is made of it and of its kinds', for whoever asks again and again; the ``key`` says what, and how."""
        if key not in self.made_once:
            self.made_once[key] = make()
        found: Made = self.made_once[key]
        return found

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy; with changes it stands alone: those of kinds would have to change, too."""
        copied = super().model_copy(update=update, deep=deep)
        if update:
            copied._of_kinds = {}
            if not deep:  # what is worked out of fields that are the same, which takes a while of thousands of blocks
                same = (name for name, fields in _WORKED_OUT.items() if fields.isdisjoint(update))
                copied.__dict__.update((name, self.__dict__[name]) for name in same if name in self.__dict__)
        return copied

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.microbatch_sizes)) or "none in common"
        return f"<Profile {self.name!r}: {len(self.blocks)} blocks, micro-batch sizes {sizes}>"

    @cached_property
    def by_id(self) -> dict[str, Block]:
        """{id: block}"""
        return {block.id: block for block in self.blocks}

    @property
    def modules(self) -> dict[str, tuple[str, ...]]:
        """{block: the modules that it is of}; blocks of which none are known are left out."""
        return {block.id: block.modules for block in self.blocks if block.modules}

    @cached_property
    def alike(self) -> dict[str, str]:
        """{block: the first one that says the same but for its name}: what holds of that holds of it."""
        firsts: dict[Hashable, str] = {}
        return {block.id: firsts.setdefault(block.meaning, block.id) for block in self.blocks}

    @cached_property
    def kinds(self) -> tuple[Block, ...]:
        """One of all blocks that are alike, for each of these."""
        return tuple(self.by_id[id_] for id_ in dict.fromkeys(self.alike.values()))

    @cached_property
    def edges_into(self) -> dict[str, list[Edge]]:
        """{block: the edges that lead to it}; blocks without any are left out."""
        found: dict[str, list[Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.target, []).append(edge)
        return found

    @cached_property
    def edges_from(self) -> dict[str, list[Edge]]:
        """{block: the edges that lead away from it}; blocks without any are left out."""
        found: dict[str, list[Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.source, []).append(edge)
        return found

    def topological_order(self) -> tuple[str, ...]:
        """Block ids such that every edge points forward, keeping the file's order where it can.

        Raises:
            ValueError: the edges have a cycle; the text names one.
        """
        return self._order

    @cached_property
    def _order(self) -> tuple[str, ...]:
        edges = ((edge.source, edge.target) for edge in self.edges)
        return topological_order([block.id for block in self.blocks], edges)

    def check_placement(self, placement: Placement, order: tuple[str, ...] | None = None) -> None:
        """Require that a placement holds every block once and that its stages are in topological order.

        Raises:
            ValueError: it does not; the text names the block or the edge.
        """
        known = set(order or self.topological_order())
        for route in range(placement.num_routes):
            on_route = [(index, stage) for index, stage in enumerate(placement.stages) if stage.route == route]
            stage_of = {block: index for index, stage in on_route for block in stage.blocks}
            for block in stage_of:
                if block not in known:
                    raise ValueError(
                        f"placement.stages[{stage_of[block]}] has block {block!r}, which is not in the profile"
                    )
            missing = [block.id for block in self.blocks if block.id not in stage_of]
            if missing:
                raise ValueError(f"placement leaves out block {missing[0]!r} ({len(missing)} in all)")
            order_of = {block: index for _, stage in on_route for index, block in enumerate(stage.blocks)}
            for edge in self.edges:
                same = stage_of[edge.source] == stage_of[edge.target]
                if same and order_of[edge.source] > order_of[edge.target]:
                    raise ValueError(
                        f"placement.stages[{stage_of[edge.source]}] runs block {edge.target!r} before {edge.source!r}, "
                        "which it needs"
                    )
                if stage_of[edge.source] > stage_of[edge.target]:
                    raise ValueError(
                        f"placement puts {edge.source!r} in stage {stage_of[edge.source]}, after stage "
                        f"{stage_of[edge.target]} of {edge.target!r} which needs it"
                    )

    @cached_property
    def expert_shards(self) -> Mapping[int, tuple[int, ...]]:
        """{how many devices share experts: how many of them may split each, ascending}, of all rows."""
        found: dict[int, set[int]] = {}
        for block in self.kinds:
            for row in block.costs:
                found.setdefault(row.expert, set()).add(row.expert_shards)
        return {expert: tuple(sorted(own)) for expert, own in sorted(found.items())}

    @property
    def has_experts(self) -> bool:
        """Whether some block has experts of its own."""
        return any(block.expert_parameters for block in self.kinds)

    def expert_shards_on(self, expert: int, said: int | None = None) -> int:
        """How many of ``expert`` devices split each expert: as ``said``, else the fewest for which there are rows."""
        return min(self.expert_shards.get(expert, (1,))) if said is None else said

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes for which every block has a row, ascending."""
        sizes = [{row.microbatch_size for row in block.rows()} for block in self.kinds]
        return tuple(sorted(set.intersection(*sizes)))


_WORKED_OUT = {
    "by_id": {"blocks"},
    "alike": {"blocks"},
    "kinds": {"blocks"},
    "edges_into": {"edges"},
    "edges_from": {"edges"},
    "_order": {"blocks", "edges"},
}
"""{what a profile works out once: the fields of which}."""
