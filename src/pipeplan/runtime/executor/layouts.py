"""Tensors inside a stage, cut among the devices of a replica: what each block takes and gives, and what lies between.

A block of a configuration takes its inputs cut along an axis of its mesh, or whole on every device, and gives its
output so. Where the next block takes it otherwise, what differs is gathered over the devices, and cut again, which
costs nothing (TensorOpt section 4.2). The gradient of a tensor is cut as the tensor is, so backward gathers where
forward cuts, and cuts where it gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from pipeplan.runtime.executor.rank_program import StagePart
from pipeplan.runtime.executor.sample_ownership import Numbers
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel.sharding import Shards
from pipeplan.workload.mesh import PLACES, SAMPLES, MeshAxis

__all__ = ["WHOLE", "StageLayouts", "TensorLayout"]

_ALONE = MeshAxis(1, 1)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The devices among which a tensor's dimensions are cut: the first is samples, the last features.

    The second is places, where a tensor has three.
    """

    samples: MeshAxis = _ALONE
    features: MeshAxis = _ALONE
    places: MeshAxis = _ALONE

    @property
    def dimensions(self) -> tuple[tuple[int, MeshAxis], ...]:
        """Each dimension with the axis that cuts it."""
        return (0, self.samples), (1, self.places), (-1, self.features)


WHOLE = TensorLayout()
"""On every device."""


def _nobody(axis: MeshAxis) -> Shards:
    """The place of a device that is alone on every axis."""
    return Shards()


@dataclass(frozen=True, slots=True)
class StageLayouts:
    """How the blocks of a stage take and give tensors on one rank; those that are not named, whole.

    Args:
        taken: of the inputs of blocks.
        given: of the outputs of blocks.
        place: of this rank among those that stand along an axis, with which it can exchange.
    """

    taken: Mapping[str, TensorLayout] = field(default_factory=dict)
    given: Mapping[str, TensorLayout] = field(default_factory=dict)
    place: Callable[[MeshAxis], Shards] = _nobody

    @classmethod
    def of(cls, part: StagePart, model: Model, along: Callable[[tuple[int, ...]], Shards]) -> StageLayouts:
        """As the meshes of the stage's blocks say; ``along`` is the place of this rank in a line of ranks."""
        taken, given = {}, {}
        for block, share, mesh in zip(part.blocks, part.shares, part.meshes, strict=True):
            samples, places = mesh.axis(SAMPLES), mesh.axis(PLACES)
            takes, gives = (_ALONE if name is None else mesh.axis(name) for name in model.slices_of(share))
            taken[block], given[block] = TensorLayout(samples, takes, places), TensorLayout(samples, gives, places)
        return cls(taken, given, lambda axis: along(part.line(axis)))

    def rows(self, block: str, own: Numbers) -> Numbers:
        """Those of a micro-batch's samples that this rank runs the block on."""
        begin, end = self.place(self.taken.get(block, WHOLE).samples).range(len(own))
        return own[begin:end]

    def sample(self, block: str, rows: Tensor) -> Tensor:
        """What a block takes of a tensor of the mini-batch, whose rows are this rank's; indices have no features."""
        layout = self.taken.get(block, WHOLE)
        mine = self.place(layout.places).sliced(rows, 1) if layout.places.size > 1 else rows
        return self.place(layout.features).sliced(mine) if rows.is_floating_point() else mine

    def summed(self, block: str, loss: Tensor) -> Tensor:
        """The loss of all samples and places, of the losses of each device's."""
        layout = self.given.get(block, WHOLE)
        return self.place(layout.places).summed(self.place(layout.samples).summed(loss))

    def converted(self, tensor: Tensor, source: TensorLayout, target: TensorLayout, num_samples: int) -> Tensor:
        """A tensor in another layout: of what differs, slices are exchanged for others, or gathered, and cut.

        ``num_samples`` are those of all the replica. What is of one size for any number of samples is not cut among
        those who have some each: its gradient is the sum of theirs.
        """
        ends = zip(source.dimensions, target.dimensions, strict=True)
        pairs = [(dimension, old, new, old.shared(new)) for (dimension, old), (_, new) in ends]
        given = {dimension: old.without(kept) for dimension, old, _, kept in pairs if old.size > kept}
        taken = {dimension: new.without(kept) for dimension, _, new, kept in pairs if new.size > kept}
        for_all = source.samples.size == 1 and (not tensor.ndim or tensor.shape[0] != num_samples)
        if for_all and 0 in taken:
            tensor = self.place(taken.pop(0)).shared(tensor)
        for gone, come in _exchanges(given, taken):
            tensor = self.place(given.pop(gone)).exchanged(tensor, come, gone)
            del taken[come]
        for dimension, axis in given.items():
            tensor = self.place(axis).gathered(tensor, dimension)
        for dimension, axis in taken.items():
            tensor = self.place(axis).sliced(tensor, dimension)
        return tensor


def _exchanges(given: Mapping[int, MeshAxis], taken: Mapping[int, MeshAxis]) -> list[tuple[int, int]]:
    """Dimensions of which one gives up the axis that the other is to be cut along, and nothing else happens to both."""
    return [
        (gone, come)
        for gone, old in given.items()
        for come, new in taken.items()
        if old == new and gone not in taken and come not in given
    ]
