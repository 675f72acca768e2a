"""Networks of the catalog: as large as their papers', the numbers of others' code, and cut at any grain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from pipeplan.catalog import networks
from pipeplan.errors import UsageError
from pipeplan.runtime.models.capture import capture
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.networks import NETWORKS, network
from pipeplan.runtime.models.networks.bert import Bert
from pipeplan.runtime.models.networks.nasnet import NasNet
from pipeplan.runtime.models.networks.resnets import ResidualBottleneck, ResNetKind
from pipeplan.runtime.models.spec import Grain, Model

NAMES = list(NETWORKS)
RESULTS = {"bert-base": (768,), "dcgan": (3, 64, 64), "nasnet-a": (1000,), "resnet50-3d": (400,), "resnext50": (1000,)}


def test_the_catalog_has_them() -> None:
    assert set(NAMES) == set(networks()) == set(RESULTS)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_results(name: str) -> None:
    module, inputs = network(name, meta=True)
    assert sum(each.numel() for each in module.parameters()) == networks()[name].parameters
    made: Tensor = module(**_on_meta(inputs))
    assert made.shape == (2, *RESULTS[name])


def _on_meta(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in inputs.items()}


def test_parameters_of_the_films_network_by_hand() -> None:
    """Convolutions without biases, two numbers per channel of a norm, three shortcuts' widths and classes."""
    convolutions, norms, inputs = 3 * 64 * 7**3, 2 * 64, 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(count):
            convolutions += inputs * width + 27 * width * width + 4 * width * width
            norms += 2 * (width + width + 4 * width)
            if block == 0:
                convolutions += inputs * 4 * width
                norms += 2 * 4 * width
            inputs = 4 * width
    assert networks()["resnet50-3d"].parameters == convolutions + norms + 2048 * 400 + 400


def test_cells_halve_where_they_reduce() -> None:
    """331 x 331: 165 behind the stem, then 83, 42, 21 and 11, with 6 or 4 widths side by side."""
    module, inputs = network("nasnet-a", meta=True)
    assert isinstance(module, NasNet)
    shapes: list[tuple[int, ...]] = []
    for cell in module.cells:
        cell.register_forward_hook(lambda _, given, made: shapes.append(tuple(made.shape[1:])))
    module(**_on_meta(inputs))
    rows = [(6 * 168, 42, 42)] * 6, [(6 * 336, 21, 21)] * 6, [(6 * 672, 11, 11)] * 6
    stem = [(4 * 42, 83, 83), (4 * 84, 42, 42)]
    assert shapes == [*stem, *rows[0], (4 * 336, 21, 21), *rows[1], (4 * 672, 11, 11), *rows[2]]


def test_a_bottleneck_in_groups_is_separate_convolutions() -> None:
    """ResNeXt's third figure: equal whether groups are written as one convolution or as paths that are added."""
    torch.manual_seed(0)
    block = ResidualBottleneck(ResNetKind(2, groups=4, group_width=4), 16, 16, 1).double().eval()
    x = torch.randn(2, 16, 5, 5, dtype=torch.float64)
    inner, each = block.mix.in_channels, block.mix.in_channels // 4
    assert inner == 4
    made = torch.relu(block.reduce_norm(block.reduce(x)))
    paths = [
        nn.functional.conv2d(made[:, a : a + each], block.mix.weight[a : a + each], padding=1)
        for a in range(0, inner, each)
    ]
    made = block.expand_norm(block.expand(torch.relu(block.mix_norm(torch.cat(paths, 1)))))
    assert block.shortcut is not None
    assert torch.allclose(block(x), torch.relu(made + block.shortcut(x)), atol=1e-12)


def test_bert_computes_what_transformers_does() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**sizes, intermediate_size=64, max_position_embeddings=12)
    theirs, ours = BertModel(config).double().eval(), Bert(2, 16, 4, 50, 12).double().eval()
    ours.load_state_dict({_renamed(name): tensor for name, tensor in theirs.state_dict().items()})
    tokens = torch.randint(50, (3, 9))
    assert torch.allclose(ours(tokens), theirs(tokens).pooler_output, atol=1e-12)


def _renamed(name: str) -> str:
    for old, new in (
        ("embeddings.word_embeddings", "embeddings.words"),
        ("embeddings.position_embeddings", "embeddings.positions"),
        ("embeddings.token_type_embeddings", "embeddings.segments"),
        ("encoder.layer.", "layers."),
        ("attention.self.", "attention."),
        ("attention.output.dense", "attention.output"),
        ("attention.output.LayerNorm", "attention.norm"),
        ("intermediate.dense", "ffn.expand"),
        ("output.dense", "ffn.output"),
        ("output.LayerNorm", "ffn.norm"),
        ("pooler.dense", "pooler"),
        ("LayerNorm", "norm"),
    ):
        name = name.replace(old, new) if not (old.startswith("output") and "attention" in name) else name
    return name


@pytest.mark.parametrize("grain", ["operator", "layer"])
def test_blocks_of_any_grain_compute_the_same(grain: Grain) -> None:
    """Cut into operators and into layers, with the parameters of one seed; a small BERT as it stands here."""
    cases: list[tuple[Model, nn.Module, dict[str, Tensor]]] = []
    module, inputs = network("dcgan", seed=3)
    cases.append((load_model("dcgan", grain=grain, seed=3), module, inputs))
    small, tokens = Bert(2, 16, 4, 50, 12).eval(), {"tokens": torch.arange(18).view(2, 9)}
    cases.append((capture(small, tokens, name="bert", grain=grain), small, tokens))
    for model, whole, given in cases:
        with torch.no_grad():
            found: dict[str, Tensor] = {}
            for block in model.blocks:
                taken = [found[source] for source, _ in block.inputs] + [given[each] for each in block.samples]
                found[block.id] = block.build().eval()(*taken)
            assert torch.allclose(found[model.blocks[-1].id], whole(**given), atol=1e-4), model.name


def test_what_networks_do_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match="resnext50 makes its own"):
        load_model("resnext50", sequence=8)
    with pytest.raises(UsageError, match="dcgan"):
        load_model("dcgan", shards=[1, 2])
