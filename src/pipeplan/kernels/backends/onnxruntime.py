"""ONNX Runtime, to which torch exports a group: an extra (``pip install pipeplan[onnxruntime]``)."""

from pipeplan.kernels.backend import Backend
from pipeplan.kernels.rules import AllBut

BACKENDS = (
    Backend(
        "onnxruntime",
        rule=AllBut("loss"),
        whole=True,
        modules=True,
        trains=False,
        devices=("cpu",),
        packages={"onnxruntime": ("", ""), "onnxscript": ("", "")},
    ),
)
