"""The part of ``pipeplan profile`` that estimates a model's costs without running it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeplan.cli.measuring import Shown, asked_model, print_profile, require_torch, warnings_told
from pipeplan.cli.outputs import require_stdout_once, require_writable

if TYPE_CHECKING:
    from pipeplan.model import Profile
    from pipeplan.runtime.model import Model

__all__ = ["estimate_and_write"]


def estimate_and_write(given: Mapping[str, Any]) -> None:
    """Estimate a model for a device preset, calibrated by a measured profile if there is one, and write the profile."""
    output: str = given["output"]
    require_stdout_once(output, given["as_json"])
    require_torch()
    require_writable(output)
    import torch

    from pipeplan.costs.presets import device_preset
    from pipeplan.model import read_cluster, read_profile, write_file
    from pipeplan.runtime.estimator import estimate_model

    begin = time.monotonic()
    preset = device_preset(given["device"])
    calibration = read_profile(given["calibrate"]) if given["calibrate"] else None
    cluster = read_cluster(given["cluster"]) if given["cluster"] else None
    with warnings_told(), Shown("estimating") as shown:
        profile = estimate_model(
            asked_model(given, meta=True),
            given["microbatch"],
            device=preset,
            dtype=getattr(torch, given["dtype"] or preset.dtype),
            shards=given["shards"],
            recompute=given["recompute"],
            calibration=calibration,
            reference=_reference(given["name"], calibration),
            cluster=cluster,
            progress=shown.update,
        )
    write_file(profile, output)
    print_profile(profile, output, time.monotonic() - begin, as_json=given["as_json"])


def _reference(name: str, calibration: Profile | None) -> Model | None:
    """The model that a calibration is of, where that is another one of the zoo."""
    from pipeplan.runtime.zoo import ZOO, zoo_model

    if calibration is None or calibration.name == name or calibration.name not in ZOO:
        return None
    sequences = {block.dimensions.get("sequence") for block in calibration.blocks} - {None}
    return zoo_model(calibration.name, sequence=max(filter(None, sequences), default=None))
