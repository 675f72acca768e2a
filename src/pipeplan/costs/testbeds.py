"""The machines that the papers measured on, as clusters: one file each in the catalog.

A paper gives number and kind of devices and at most the names of links. What is nominal or assumed beyond that is
said in the notes of each file's source.
"""

from __future__ import annotations

from pipeplan.catalog.reading import names, read_text
from pipeplan.errors import UsageError
from pipeplan.model import Cluster, parse

__all__ = ["TESTBEDS", "cluster_of_paper"]

TESTBEDS = names("clusters")
"""Every testbed by name."""


def cluster_of_paper(name: str, num_devices: int | None = None) -> Cluster:
    """The cluster of a paper; with ``num_devices`` nodes are left out or added, and the last one may be partly used.

    Raises:
        UsageError: there is no testbed of this name, or the number of devices is not one.
    """
    if name not in TESTBEDS:
        raise UsageError(f"there is no testbed {name!r}; choose from {', '.join(TESTBEDS)}")
    cluster = parse(read_text("clusters", name), Cluster, f"{name}.json")
    return cluster if num_devices in (None, cluster.num_devices) else _resized(cluster, num_devices)


def _resized(cluster: Cluster, num_devices: int) -> Cluster:
    """The same nodes and links, but more or fewer of them: levels are cut to the devices and the last one holds all."""
    if num_devices < 1:
        raise UsageError(f"{num_devices} devices are no cluster; give 1 or more")
    *inner, outermost = cluster.levels
    levels = [level for level in inner if level.group_size < num_devices]
    last = outermost if len(levels) == len(inner) else inner[len(levels)]
    size = levels[-1].group_size if levels else 1
    levels.append(last.model_copy(update={"group_size": -(-num_devices // size) * size}))
    notes = f"{num_devices} devices instead of the paper's {cluster.num_devices}. {cluster.source.notes}"
    resized = cluster.model_copy(
        update={
            "name": f"{cluster.name}-{num_devices}",
            "devices": (cluster.devices[0].model_copy(update={"count": num_devices}),),
            "levels": tuple(levels),
            "source": cluster.source.model_copy(update={"notes": notes}),
        }
    )
    return Cluster.model_validate(resized.model_dump())  # a copy is not validated by itself
