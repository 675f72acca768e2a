"""ONNX Runtime: the group as torch exports it, in a session on as many threads as torch has."""

import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeplan.runtime.backends.building import BuiltGroup, GroupModule

DETERMINISTIC = True


def versions() -> dict[str, str]:
    """Of what exports and what runs."""
    return {name: version(name) for name in ("onnxruntime", "onnxscript")}


def build(name: str, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> BuiltGroup:
    """Export, load and optimise.

    Its threads spin for a while after a run, which is quickest where nothing else runs; of a part of a model they do
    not, as they would take the cores of what comes next.
    """
    import onnxruntime  # type: ignore[import-not-found, import-untyped, unused-ignore]  # an extra that may not be there

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    if isinstance(module, GroupModule) and not module.whole:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, of deprecated functions that it calls
        path = Path(folder) / "group.onnx"
        torch.onnx.export(module.eval(), inputs, str(path), dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def call(*taken: Tensor) -> object:
        given = {name: tensor.contiguous().numpy() for name, tensor in zip(names, taken, strict=True)}
        made = tuple(map(torch.from_numpy, session.run(None, given)))
        return made if len(made) > 1 else made[0]

    return BuiltGroup(call)
