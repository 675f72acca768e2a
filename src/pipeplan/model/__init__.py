"""What things are: profile, cluster, placement, action, plan. Frozen types, JSON in and out."""

from pipeplan.model.action import COMPUTE_KINDS, Action, in_order, is_instruction, operation_of, payload_of
from pipeplan.model.base import File, FileModel, Source
from pipeplan.model.cluster import Cluster, DeviceKind, LinkLevel, MeasuredCurve
from pipeplan.model.elements import Dependency, Device, DeviceMemory, Hop, Operation, Repetend, Stage
from pipeplan.model.files import (
    FORMATS,
    parse,
    read_cluster,
    read_placement,
    read_plan,
    read_profile,
)
from pipeplan.model.forms import sha256_of
from pipeplan.model.mesh import COPIES, PLACES, SAMPLES, SHARDS, Axis, Mesh
from pipeplan.model.placement import PlacedStage, Placement
from pipeplan.model.plan import Plan, Predicted, Provenance
from pipeplan.model.profile import Block, CostRow, Edge, Profile
from pipeplan.model.writing import to_json, write_file, write_text

__all__ = [
    "COMPUTE_KINDS",
    "COPIES",
    "FORMATS",
    "PLACES",
    "SAMPLES",
    "SHARDS",
    "Action",
    "Axis",
    "Block",
    "Cluster",
    "CostRow",
    "Dependency",
    "Device",
    "DeviceKind",
    "DeviceMemory",
    "Edge",
    "File",
    "FileModel",
    "Hop",
    "LinkLevel",
    "MeasuredCurve",
    "Mesh",
    "Operation",
    "PlacedStage",
    "Placement",
    "Plan",
    "Predicted",
    "Profile",
    "Provenance",
    "Repetend",
    "Source",
    "Stage",
    "in_order",
    "is_instruction",
    "operation_of",
    "parse",
    "payload_of",
    "read_cluster",
    "read_placement",
    "read_plan",
    "read_profile",
    "sha256_of",
    "to_json",
    "write_file",
    "write_text",
]
