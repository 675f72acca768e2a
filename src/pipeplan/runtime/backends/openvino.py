"""OpenVINO: the group as its reader of torch modules sees it, compiled for the processor."""

import warnings
from importlib.metadata import version

import torch
from torch import Tensor, nn

from pipeplan.runtime.backends.building import BuiltGroup

DETERMINISTIC = True


def versions() -> dict[str, str]:
    """Of the library."""
    return {"openvino": version("openvino")}


def build(name: str, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> BuiltGroup:
    """Convert and compile, on as many threads as torch has, in the number format of the weights."""
    import openvino  # type: ignore[import-not-found, import-untyped, unused-ignore]  # an extra that may not be there

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        read = openvino.convert_model(module.eval(), example_input=inputs)
        for port, tensor in zip(read.inputs, inputs, strict=True):
            port.get_node().set_partial_shape(openvino.PartialShape(list(tensor.shape)))
        read.validate_nodes_and_infer_types()
        how = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
        compiled = openvino.compile_model(read, "CPU", how)

    def call(*taken: Tensor) -> object:
        found = compiled([tensor.contiguous().numpy() for tensor in taken])
        made = tuple(torch.from_numpy(found[port]) for port in compiled.outputs)
        return made if len(made) > 1 else made[0]

    return BuiltGroup(call)
