"""The papers' models as profiles: blocks and edges as the papers' tables have them, costs by closed forms.

The sizes are data (``catalog/models``); ``docs/models.md`` compares parameters with the papers' and says what they
leave open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeplan.catalog.reading import ModelSize, model_sizes
from pipeplan.costs.blocks import state_recipe
from pipeplan.costs.communication import prices_in
from pipeplan.costs.devices import device_preset
from pipeplan.errors import UsageError
from pipeplan.examples.families import FAMILIES, Family
from pipeplan.examples.layout import RECIPE, ModelLayout
from pipeplan.examples.parts import WIDTH
from pipeplan.files import Cluster, Profile, Source
from pipeplan.workload.kinds import OPTIMIZER

__all__ = ["MODELS", "family_of", "model"]

MODELS: Mapping[str, ModelSize] = {name: size for name, size in model_sizes().items() if size.reference}
"""Every model of a paper by name."""

_MOST_SAMPLES = 65_536
_MOST_SHARDS = 1024

_ESTIMATE = (
    "Estimated by closed forms, not measured. Parameters, gradients and activations in 16 bits, statistics and loss in "
    "float32; optimizer state of {recipe}, {size} bytes per parameter. Times by a roofline whose efficiency "
    "grows with a kernel's size up to 70 % of the peak FLOP/s and 85 % of the bandwidth, both assumed; causal masks "
    "halve attention, no dropout, fused attention."
)

_SPLIT = (
    "Rows for several shards are of one device's share as Megatron-LM splits it, with all-reduce, all-gather and "
    "reduce-scatter in their times: rings over the links of {}. Norms, poolings and concatenations are whole on every "
    "device, whose parameters a stage nevertheless divides by its shards."
)


def family_of(name: str) -> Family:
    """The dimensions of a paper's model, which lay it out; ``name`` is one of ``MODELS``."""
    size = MODELS[name]
    return FAMILIES[size.family](**size.dimensions)


def model(
    name: str,
    *,
    device: str = "a100-80gb",
    microbatch_sizes: Sequence[int] | None = None,
    shards: Sequence[int] = (1,),
    cluster: Cluster | None = None,
) -> Profile:
    """The profile of a paper's model, for a device preset, with a cost row per number of shards and micro-batch size.

    ``shards`` are how many devices split a block; a row's collectives are in its times, over the device's own links
    or among the first devices of ``cluster``.

    Raises:
        UsageError: an unknown model or device, no or unusable micro-batch sizes or shards, or too small a cluster.
    """
    if name not in MODELS:
        raise UsageError(f"there is no model {name!r}; choose from {', '.join(MODELS)}")
    paper, preset = MODELS[name], device_preset(device)
    sizes = sorted(set(paper.microbatch_sizes if microbatch_sizes is None else microbatch_sizes))
    if not sizes or sizes[0] < 1 or sizes[-1] > _MOST_SAMPLES:
        raise UsageError(f"--microbatch must be sizes from 1 to {_MOST_SAMPLES}, not {sizes}")
    groups = _usable(shards, cluster)
    layout = ModelLayout(preset, sizes, shards=groups, prices=None if cluster is None else prices_in(cluster))
    family_of(name).build(layout)
    split = _SPLIT.format(cluster.name if cluster is not None else preset.title) if groups[-1] > 1 else ""
    return Profile(
        name=name,
        source=Source(
            method="estimated",
            device=preset.title,
            dtype=preset.dtype,
            reference=paper.reference,
            notes=" ".join(filter(None, [_estimate(), split, f"Device: {preset.source}.", paper.notes])),
        ),
        blocks=tuple(layout.blocks),
        edges=tuple(layout.edges),
    )


def _estimate() -> str:
    recipe = state_recipe(RECIPE)
    return _ESTIMATE.format(recipe=recipe.title, size=recipe.state(1, WIDTH)[OPTIMIZER])


def _usable(shards: Sequence[int], cluster: Cluster | None) -> list[int]:
    groups = sorted(set(shards))
    if not groups or groups[0] < 1 or groups[-1] > _MOST_SHARDS:
        raise UsageError(f"--shards must be numbers of devices from 1 to {_MOST_SHARDS}, not {groups}")
    if cluster is not None and groups[-1] > cluster.num_devices:
        raise UsageError(
            f"--shards {groups[-1]} is more than the {cluster.num_devices} devices of cluster {cluster.name!r}; "
            "leave it out or give a larger --cluster"
        )
    return groups
