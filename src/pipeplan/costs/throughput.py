"""What an iteration's time means: samples and tokens per second, utilisation, and what one device would take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from pipeplan.costs.devices import peak_flops_per_s
from pipeplan.files import Block, CostRow, Plan, Profile
from pipeplan.files.profile import EAGER
from pipeplan.workload.workload import Workload

PASSES = 3
"""Forward, input gradients and weight gradients: as many products each. Recomputation is not counted."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Of one iteration; what cannot be known is None.

    ``model_flops_utilisation`` is the FLOPs that a sample's forward and backward need, times samples, over what all
    devices could do in that time at their peak for the number format: PaLM (Chowdhery et al. 2022), appendix B.
    """

    samples_per_second: float | None
    tokens_per_second: float | None
    model_flops_utilisation: float | None

    def figures(self) -> dict[str, object]:
        """Keys that every verb's ``--json`` has for an iteration."""
        return asdict(self)

    @property
    def words(self) -> str:
        """What is known, in one line: ``3.2 samples/s, 3277 tokens/s, 41.3% of peak``."""
        rates = ((self.samples_per_second, "samples/s"), (self.tokens_per_second, "tokens/s"))
        said = [f"{format_rate(rate)} {unit}" for rate, unit in rates if rate is not None]
        share = self.model_flops_utilisation
        return ", ".join([*said, *([] if share is None else [f"{share:.1%} of peak"])])


def format_rate(value: float) -> str:
    """A rate for people, with four significant digits before the point or after it: ``12600``, ``3.277``."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What a sample is, and for which device and number format times are; empty or None where that is not known.

    ``estimated``: nobody measured the times, and a reader must not take them for measured ones. ``peaks`` is what the
    devices' peaks come to, over that of as many of the named one: 1 unless some have profiles of their own. ``passes``
    is how often a sample takes the FLOPs of its forward: once in inference.
    """

    device: str
    dtype: str
    tokens_per_sample: int | None
    forward_flops_per_sample: int | None
    estimated: bool = False
    peaks: float | None = 1.0
    passes: int = PASSES

    @classmethod
    def of(cls, profile: Profile, names: Sequence[str] = ()) -> Yardstick:
        """A profile's, on devices of kinds with these ``names``."""
        source, tokens, flops = profile.source, profile.tokens_per_sample, profile.forward_flops_per_sample
        others = {kind: (own.source.device, own.source.dtype) for kind, own in profile.of_kinds.items()}
        peaks = _peaks((source.device, source.dtype), others, names)
        passes = 1 if profile.is_inference else PASSES
        return cls(source.device, source.dtype, tokens, flops, source.method == "estimated", peaks, passes)

    @classmethod
    def of_plan(cls, plan: Plan) -> Yardstick:
        """The yardstick of the profile that a plan was made from."""
        made = plan.provenance
        flops = made.forward_flops_per_sample
        others = {kind: (own.device, own.dtype) for kind, own in made.profiles.items()}
        peaks = _peaks((made.device, made.dtype), others, [device.name for device in plan.devices])
        passes = 1 if plan.is_inference else PASSES
        tokens = made.tokens_per_sample
        return cls(made.device, made.dtype, tokens, flops, made.method == "estimated", peaks, passes)

    def on(self, device: str, dtype: str, *, estimated: bool = False) -> Yardstick:
        """The same samples on another device, or in another number format."""
        return replace(self, device=device, dtype=dtype, estimated=estimated)

    def throughput(self, samples: int, iteration_ns: float, num_devices: float) -> Throughput:
        """The throughput of an iteration over ``samples`` on all of ``num_devices``, idle ones included.

        One of another speed than those that times are of counts as so many of these.
        """
        rate = 1e9 * samples / iteration_ns if iteration_ns else None
        if rate is None:
            return Throughput(None, None, None)
        one, flops = peak_flops_per_s(self.device, self.dtype), self.forward_flops_per_sample
        peak = None if one is None or self.peaks is None else one * self.peaks
        return Throughput(
            rate,
            None if self.tokens_per_sample is None else rate * self.tokens_per_sample,
            None if peak is None or flops is None else self.passes * flops * rate / (num_devices * peak),
        )


def _peaks(own: tuple[str, str], others: Mapping[str, tuple[str, str]], names: Sequence[str]) -> float | None:
    """The peaks of devices with these names over as many of a first one, by device and format; None if not known."""
    if not others or not names:
        return 1.0
    first, *rest = (peak_flops_per_s(*each) for each in (own, *(others.get(name, own) for name in names)))
    if not first or None in rest:
        return None
    return sum(each for each in rest if each is not None) / (first * len(names))


def one_device_ns(profile: Profile, workload: Workload) -> float | None:
    """What one device would work on an iteration's samples, in ns, if it had memory for them; None where not known.

    Blocks run whole, one after another, nothing recomputed, in micro-batches of the profile's quickest size, backward
    in one piece or in two, whichever is quicker: so what is compared with it gains nothing from either.
    """
    blocks = profile.by_id
    names = [name for stage in workload.stages if stage.route == 0 for name in stage.blocks]
    if any(name not in blocks for name in names):
        return None
    every = [{row.microbatch_size: _quickest_ns(row) for row in _whole(blocks[name])} for name in names]
    sizes = set[int]().union(*every).intersection(*every)
    fitting = [size for size in sizes if size <= workload.mini_batch] or sizes
    times = (sum(times[size] for times in every) * workload.mini_batch / size for size in fitting)
    return min(times, default=None)


def _whole(block: Block) -> Iterator[CostRow]:
    """The rows of one device, with nothing recomputed."""
    return (row for row in block.costs if row.key == (row.microbatch_size, 1, 1, 1, 1, None, False, EAGER))


def _quickest_ns(row: CostRow) -> int:
    """Forward and backward."""
    if row.input_grad_ns is None or row.weight_grad_ns is None:
        return row.forward_ns + row.whole_backward_ns
    return row.forward_ns + min(row.whole_backward_ns, row.input_grad_ns + row.weight_grad_ns)
