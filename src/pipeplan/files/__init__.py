"""The file formats: profile, cluster, placement, plan, modules; frozen types, JSON in and out, every version read.

Here: what a file may say, its versions and migrations, traces. Not here: what follows from it in time and memory
(workload), whether a plan is right (checker).
"""

from pipeplan.files.base import File, FileModel, Source, sha256_of
from pipeplan.files.cluster import Cluster, DeviceKind, FailureDomain, LinkLevel, MeasuredCurve
from pipeplan.files.cover import Cover, CoveredGroup
from pipeplan.files.modules import Modules, StageModules
from pipeplan.files.placement import PlacedStage, Placement
from pipeplan.files.plan import Plan, Predicted, Provenance
from pipeplan.files.profile import (
    BackendFusion,
    BackendRefusal,
    Block,
    CostRow,
    Edge,
    PhaseRow,
    Profile,
    RingCosts,
    RunGroup,
    TiedParameter,
    WholeRun,
)
from pipeplan.files.read_write import (
    FORMATS,
    parse,
    read_cluster,
    read_cover,
    read_modules,
    read_placement,
    read_plan,
    read_profile,
    require_writable,
    to_json,
    write_elsewhere,
    write_file,
    write_text,
)
from pipeplan.files.recipe import Recipe

__all__ = [
    "FORMATS",
    "BackendFusion",
    "BackendRefusal",
    "Block",
    "Cluster",
    "CostRow",
    "Cover",
    "CoveredGroup",
    "DeviceKind",
    "Edge",
    "FailureDomain",
    "File",
    "FileModel",
    "LinkLevel",
    "MeasuredCurve",
    "Modules",
    "PhaseRow",
    "PlacedStage",
    "Placement",
    "Plan",
    "Predicted",
    "Profile",
    "Provenance",
    "Recipe",
    "RingCosts",
    "RunGroup",
    "Source",
    "StageModules",
    "TiedParameter",
    "WholeRun",
    "parse",
    "read_cluster",
    "read_cover",
    "read_modules",
    "read_placement",
    "read_plan",
    "read_profile",
    "require_writable",
    "sha256_of",
    "to_json",
    "write_elsewhere",
    "write_file",
    "write_text",
]
