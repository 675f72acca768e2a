"""ONNX Runtime, to which torch exports a group: an extra (``pip install pipeplan[onnxruntime]``)."""

from pipeplan.kernels.backend import Backend
from pipeplan.kernels.rules import ShortGroups

_LONGEST = 4
"""Operators of a group. Losses, which inference does not have, are in none."""

BACKENDS = (
    Backend(
        "onnxruntime",
        rule=ShortGroups(_LONGEST, "loss"),
        whole=True,
        compiles_slowly=True,
        trains=False,
        devices=("cpu",),
        packages={"onnxruntime": ("", ""), "onnxscript": ("", "")},
    ),
)
