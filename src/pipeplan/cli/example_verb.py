"""``pipeplan example``: write a ready input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from pipeplan import _api
from pipeplan.cli.output import Outputs
from pipeplan.cli.shared import (
    BYTES,
    COUNTS,
    DEVICE,
    DURATION,
    EXAMPLE,
    FILE,
    NUM_DEVICES,
    NUMBER,
    OneOf,
    Ratios,
    given_file,
)
from pipeplan.errors import UsageError

if TYPE_CHECKING:
    from pipeplan._api import Cluster, Profile

_SHARED = ("shared_forward_ns", "shared_backward_ns")
_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

_WITH_SHARED = ("m", "mllm", "nn", "k")
_OF_ALL = ("name", "output")
_TREE = ("racks", "oversubscription", "rails", "power")
_TAKERS = {
    **dict.fromkeys(("device", "microbatch", "shards", "cluster"), ("models",)),
    "devices": ("shapes", "clusters"),
    "inference": ("shapes", "models"),
    **dict.fromkeys(("nominal", "overlap", *_TREE), ("clusters",)),
}
"""Parameter -> the kinds of examples that take it; all others are of shapes."""


class _Command(click.Command):
    """Its help lists what the catalog has."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The text, and lists of all models, clusters and testbeds."""
        super().format_help_text(ctx, formatter)
        for kind, listed in _api.example_names().items():
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(f"{kind.capitalize()}: {', '.join(_together(listed))}.")


def _together(names: Iterable[str]) -> Iterator[str]:
    """Names that differ only in their last word as one: ``gpt2-{124m,345m}``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        prefix, dash, last = name.rpartition("-")
        groups.setdefault(prefix + dash or name, []).append(last)
    for prefix, ends in groups.items():
        yield f"{prefix}{{{','.join(ends)}}}" if len(ends) > 1 else prefix + ends[0] * prefix.endswith("-")


def _duration(flag: str, text: str, default: str | None = None) -> Callable[[_Decorated], _Decorated]:
    """An option ``--x-y`` that is a shape's ``x_y_ns``."""
    parameter = f"{flag[2:].replace('-', '_')}_ns"
    return click.option(flag, parameter, type=DURATION, default=default, help=text)


@click.command("example", cls=_Command)
@click.argument("name", type=EXAMPLE, metavar="NAME")
@click.option("--devices", type=NUM_DEVICES, default=4, help="Number of devices.")
@click.option(
    *("--chunks", "--vp", "--virtual-stages", "chunks"),
    type=NUMBER,
    help="Virtual stages: stages per device of shape-circular.  [default: 2]",
)
@click.option("--inference", is_flag=True, help="Forwards alone, of a shape or a model.")
@click.option("--forward", "forward_ns", type=DURATION, default="1ms", help="Forward time of a chain block.")
@_duration("--backward", "Backward time of a chain block.  [default: 3ms]")
@click.option(
    "--input-grad", "input_grad_ns", type=DURATION, help="Input-gradient time of a chain block, instead of --backward."
)
@click.option(
    "--weight-grad", "weight_grad_ns", type=DURATION, help="Weight-gradient time of a chain block, with --input-grad."
)
@click.option(
    "--shared-forward",
    "shared_forward_ns",
    type=DURATION,
    help="Forward time of a block on all devices.  [default: 1ms]",
)
@click.option(
    "--shared-backward",
    "shared_backward_ns",
    type=DURATION,
    help="Backward time of a block on all devices.  [default: 1ms]",
)
@click.option("--comm", "comm_ns", type=DURATION, default="0", help="Latency between chain blocks, on any cluster.")
@click.option(
    *("--bytes", "edge_bytes"),
    type=BYTES,
    default="0",
    help="Tensor on each edge, which a cluster's links carry; instead of --comm.",
)
@click.option("--activation-bytes", type=BYTES, default="1GB", help="Activations that each chain block holds.")
@click.option(
    "--weight-grad-bytes", type=BYTES, default="0", help="Bytes held from the input gradient to the weight gradient."
)
@click.option(
    "--device",
    type=DEVICE,
    metavar="PRESET",
    help="Device that a model's costs are for.  [default: a100-80gb; of graphpipe-case-study v100-16gb]",
)
@click.option("--microbatch", type=COUNTS, metavar="1,2,4", help="Micro-batch sizes that a model has costs for.")
@click.option(
    "--shards",
    type=COUNTS,
    metavar="1,2,4",
    help="Numbers of devices that split a block, each with its costs.  [default: 1]",
)
@click.option(
    "--nominal",
    is_flag=True,
    help="Links of a cluster as data sheets state them, not as runs reach them, and nothing in compute's way.",
)
@click.option(
    "--overlap",
    type=OneOf(["none", "sums", "all"]),
    default="sums",
    help="Exchanges once an iteration beside compute: sums of gradients, as pipeplan run has them; all, as Megatron-LM "
    "and FSDP do; or none.",
)
@click.option(
    *("--rack", "racks"),
    type=COUNTS,
    metavar="NODES",
    help="A cluster as a fat tree: nodes under one switch, as 4; with more tiers of switches, of each, as 4,32.",
)
@click.option(
    "--oversubscription",
    type=Ratios(),
    metavar="R",
    help="With --rack, what the devices under a switch could send at once over what its uplinks carry, as 4 or 4:1; "
    "for each tier, as 1,4.  [default: 1]",
)
@click.option(
    "--rails", is_flag=True, help="With --rack, switches of rails: device i of each node is under switch i of its rack."
)
@click.option(
    "--power", type=NUMBER, metavar="NODES", help="With --rack, nodes that share a power supply and fail together."
)
@click.option("--cluster", type=FILE, metavar="FILE", help="Cluster whose links time the collectives of split blocks.")
@click.option("-o", "--output", type=FILE, default="-", metavar="FILE", help="Where to write; - for stdout.")
@click.pass_context
def example_command(ctx: click.Context, /, name: str, output: str, **_: Any) -> None:
    """Write a ready input, by NAME: a shape with its placement, a paper's model with estimated costs, or a cluster.

    Shapes: shape-v, shape-x, shape-m, shape-mllm, shape-nn, shape-k, shape-circular, shape-zbv. Costs are for one
    micro-batch on one device; shape-circular and shape-zbv divide them among the device's chunks.

    Models take only --device, --microbatch, --shards, --cluster and --inference. Clusters are nodes of a maker's
    devices, with links at the share of their nominal rates that published runs reach, and with a contention of 0.4: an
    exchange slows what is computed beside it by that part of its time. --nominal leaves rates as they are, and has no
    contention. Testbeds are the machines of papers. --devices cuts or extends clusters; --rack puts switches above
    their nodes.
    """
    with Outputs({"-o": output}) as outputs:
        outputs.write(made_example(ctx), output)


def made_example(ctx: click.Context) -> Profile | Cluster:
    """What the flags ask for. Raises UsageError."""
    given = dict(ctx.params)
    name, devices, chunks = given.pop("name"), given.pop("devices"), given.pop("chunks")
    device, cluster = given.pop("device"), given_file("cluster", given.pop("cluster"))
    sizes, shards, _ = given.pop("microbatch"), given.pop("shards"), given.pop("output")
    nominal, overlap = given.pop("nominal"), given.pop("overlap")
    tree = {name: given.pop(name) for name in _TREE}
    kind = _api.example_kind(name)
    _refuse_others(ctx, name, kind)
    if kind == "clusters":
        asked = devices if ctx.get_parameter_source("devices") is ParameterSource.COMMANDLINE else None
        said = {name: value or () for name, value in tree.items() if name in ("racks", "oversubscription")}
        return _api.make_cluster(name, asked, nominal=nominal, overlap=overlap, **{**tree, **said})
    if kind == "models":
        how = {"device": device, "microbatch_sizes": sizes, "shards": shards or (1,), "inference": given["inference"]}
        return _api.make_model(name, **how, cluster=cluster)
    _require_shared(ctx, name, given)
    if given["inference"] and given["shared_backward_ns"] is not None:
        raise UsageError("--shared-backward is of training, and --inference runs forwards alone; leave one of them out")
    return _api.make_shape(name, devices, chunks=chunks, **given)


def _require_shared(ctx: click.Context, name: str, costs: Mapping[str, int | None]) -> None:
    """Refuse costs of a shared block of shapes that have none."""
    for parameter in _SHARED:
        if costs[parameter] is not None and name.removeprefix("shape-") not in _WITH_SHARED:
            raise UsageError(
                f"{_flag(ctx, parameter)} does not apply to {name}, which has no shared block; leave it out"
            )


def _flag(ctx: click.Context, parameter: str) -> str:
    return next(each.opts[0] for each in ctx.command.params if each.name == parameter)


def _refuse_others(ctx: click.Context, name: str, kind: str) -> None:
    """Refuse flags that are not for this kind of example."""
    for parameter in ctx.params:
        given = ctx.get_parameter_source(parameter) is ParameterSource.COMMANDLINE
        takers = _TAKERS.get(parameter, ("shapes",))
        if given and parameter not in _OF_ALL and kind not in takers:
            raise UsageError(f"{_flag(ctx, parameter)} is for {' and '.join(takers)}, not for {name}; leave it out")
