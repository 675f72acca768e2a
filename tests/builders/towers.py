"""A small model of two towers and a contrastive loss, as CLIP has them."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.files import Block, CostRow, Edge, Profile, Source


def towers(
    image: Sequence[int] = (2,) * 8,
    text: Sequence[int] = (2,) * 4,
    *,
    loss: int = 1,
    loss_shards: Sequence[int] = (1,),
    before: bool = False,
    parameter_bytes: int = 0,
) -> Profile:
    """Two chains with blocks that run forward in ``image`` and ``text`` [block] ns and backward in twice that.

    Block ``contrast``, which takes ``loss`` ns, joins them. Each block holds 2 bytes per micro-batch. ``before`` puts a
    block before the first ones of both.
    """
    names = {"image": image, "text": text}
    blocks = [
        _block(f"{name}.{index}", time, parameter_bytes=parameter_bytes)
        for name, times in names.items()
        for index, time in enumerate(times)
    ]
    edges = [
        Edge(source=f"{name}.{index - 1}", target=f"{name}.{index}")
        for name, times in names.items()
        for index in range(1, len(times))
    ]
    edges += [Edge(source=f"{name}.{len(times) - 1}", target="contrast") for name, times in names.items()]
    if before:
        blocks.append(_block("start", 1))
        edges += [Edge(source="start", target=f"{name}.0") for name in names]
    blocks.append(_block("contrast", loss, shards=loss_shards))
    return Profile(name="towers", source=Source(method="estimated"), blocks=tuple(blocks), edges=tuple(edges))


def _block(id_: str, time: int, *, parameter_bytes: int = 0, shards: Sequence[int] = (1,)) -> Block:
    rows = tuple(
        CostRow(
            microbatch_size=1,
            shards=count,
            forward_ns=time,
            backward_ns=2 * time,
            input_grad_ns=time,
            weight_grad_ns=time,
            activation_bytes=2,
        )
        for count in shards
    )
    return Block(id=id_, operator="layer", parameter_bytes=parameter_bytes, costs=rows)
