"""OpenVINO, which reads torch's modules by itself: an extra (``pip install pipeplan[openvino]``)."""

from pipeplan.kernels.backend import Backend
from pipeplan.kernels.rules import AllBut

BACKENDS = (
    Backend(
        "openvino",
        rule=AllBut("loss"),
        whole=True,
        modules=True,
        trains=False,
        devices=("cpu",),
        packages={"openvino": ("", "")},
    ),
)
