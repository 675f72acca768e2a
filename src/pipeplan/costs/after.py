"""What follows a stage's actions, before it is known which blocks it has: by the bytes of its gradients alone.

Everything that training keeps of parameters is in proportion to gradients, as a recipe says; with the recipe
``custom``, which says nothing, the proportion is that of the whole profile. For what cuts and bounds choose by; plans
have the times of what their stages keep (:mod:`pipeplan.costs.stages`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeplan.costs.communication import Exchange, price_of_groups
from pipeplan.costs.recipes import expert_state_of, state_of, states_of, step_bytes
from pipeplan.costs.speeds import at_speed
from pipeplan.costs.zero import WHOLE, Zero, cuts, price_of_exchange, updated_bytes
from pipeplan.files import Cluster, Profile
from pipeplan.workload.elements import Stage
from pipeplan.workload.kinds import GRADIENTS, MemoryBytes

_Price = Callable[[int], tuple[int, int]]
"""Of bytes of gradients, ns."""


@dataclass(frozen=True, slots=True)
class AfterActions:
    """Ns of summing gradients over replicas, of the optimizer's step, and of gathering parameters.

    A replica is ``shards`` devices, neighbours of each other; ``sharing`` says how many replicas shard what they keep.
    The profile's blocks keep ``kept`` together, of which a step has ``moved`` so many bytes on a device of some
    ``speed``.
    """

    profile: Profile
    cluster: Cluster | None
    kept: MemoryBytes
    shards: int = 1
    sharing: Callable[[int], Zero | None] = lambda replicas: WHOLE
    speed: float = 1.0
    moved: dict[Zero, int] = field(default_factory=dict)
    _prices: dict[tuple[int, int, Zero], _Price] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster | None,
        shards: int = 1,
        sharing: Callable[[int], Zero | None] = lambda replicas: WHOLE,
        speed: float = 1.0,
    ) -> AfterActions:
        """For the stages of a profile on a cluster."""
        kept = sum(states_of(profile).values(), MemoryBytes())
        return cls(profile, cluster, kept, shards, sharing, speed)

    @property
    def of_experts(self) -> int:
        """Bytes of all gradients of experts, wherever they are."""
        blocks, recipe = self.profile.blocks, self.profile.recipe
        return sum(expert_state_of(block, recipe)[GRADIENTS] for block in blocks if block.expert_parameters)

    @property
    def steps(self) -> bool:
        """Whether a stage without replicas has something after its actions, too."""
        return self.profile.step_bytes_per_s is not None

    def __call__(self, size: int, replicas: int) -> int:
        """The time for a stage with ``size`` bytes of gradients on each device, and this many replicas.

        Which links thousands of devices share is looked up once for all sizes.
        """
        return sum(self.parts(size, replicas))

    def parts(self, size: int, replicas: int) -> tuple[int, int]:
        """The same: ns of summing gradients, which may run beside other stages' actions, and of what follows."""
        zero = self.sharing(replicas) or WHOLE
        key, step = (self.shards, replicas, zero), self._step_ns(size, zero)
        if replicas < 2:
            return 0, step
        if key not in self._prices:
            self._prices[key] = self._price(tuple(range(replicas * self.shards)), zero)
        summed, gathered = self._prices[key](size)
        return summed, step + gathered

    def on(self, size: int, devices: tuple[int, ...]) -> int:
        """The same where these are the stage's devices, those of a replica next to each other."""
        replicas = len(devices) // self.shards
        zero = self.sharing(replicas) or WHOLE
        return self._step_ns(size, zero) + (sum(self._price(devices, zero)(size)) if replicas > 1 else 0)

    def _step_ns(self, size: int, zero: Zero) -> int:
        recipe, rate = self.profile.recipe, self.profile.step_bytes_per_s
        if rate is None or not self.kept[GRADIENTS]:
            return 0
        if zero not in self.moved:
            self.moved[zero] = step_bytes(self.kept.share(cuts(recipe, zero)), recipe)
        return at_speed(10**9 * size * self.moved[zero] // (self.kept[GRADIENTS] * rate), self.speed)

    def _price(self, devices: tuple[int, ...], zero: Zero) -> _Price:
        """Ns of what these devices exchange, sums and gathers, of any bytes of gradients."""
        if zero == WHOLE:
            sums = price_of_groups(self.cluster, [devices[shard :: self.shards] for shard in range(self.shards)])
            return lambda size: (round(sums(Exchange("all_reduce", size))), 0)
        replicas = len(devices) // self.shards
        stage = Stage(
            blocks=("",),
            devices=devices,
            shards=self.shards,
            replicas=replicas,
            microbatch_size=replicas,
            **zero.keys(replicas),
        )
        exchanged = price_of_exchange(self.cluster, stage, [stage])

        def price(size: int) -> tuple[int, int]:
            share = {kind: size * own // max(1, self.kept[GRADIENTS]) for kind, own in self.kept.items()}
            return exchanged(size, 0, updated_bytes(stage.with_state(MemoryBytes(share)), self.profile.recipe))

        return price


def least_steps_ns(profile: Profile) -> int:
    """Ns of the optimizer's steps of all devices together at least: every parameter is stepped somewhere.

    What several devices have of one they all step; what they divide is rounded up.
    """
    if profile.step_bytes_per_s is None:
        return 0
    kept = sum(states_of(profile).values(), MemoryBytes())
    for tied in profile.tied:
        kept -= state_of(tied, profile.recipe) * (len(tied.blocks) - 1)
    return max(0, 10**9 * step_bytes(kept, profile.recipe) // profile.step_bytes_per_s)
