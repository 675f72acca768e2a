"""Which devices of a cluster each stage group stands on."""

from pipeplan.partition.mapping.links import LinkTime, link_time
from pipeplan.partition.mapping.search import mapped

__all__ = ["LinkTime", "link_time", "mapped"]
