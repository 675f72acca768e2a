"""Published training runs, read into the words of a uniform layout.

Of a row only what says the configuration is read: ``model`` without its name, ``seq``, ``hardware``, ``gpus``, batch
sizes, the layout, ``schedule``, ``sequence_parallel``, ``zero``, ``fsdp``, ``recompute``, ``precision``, ``optimizer``,
``overlap``, ``attention``. What is absent or null was not printed, and is assumed by one rule for all rows:

========================  =========================================================================================
not printed               assumed
========================  =========================================================================================
``tp``, ``pp``, ``cp``    1
``optimizer``             AdamW; so where its text names no kind
``gradient dtype``        gradients are summed in the format they are kept in, with FSDP in the one that computes
``schedule``              1F1B
``vp``                    1, where the schedule is called interleaved 2 (not: "interleaved when ...")
``sequence_parallel``     with tensor parallelism, but for DeepSpeed's pipeline engine, which has none
``recompute``             nothing
``recomputed share``      where some layers or products are, of a number that is not said, half (the catalog's choice);
                          MLPs and experts that are named among modules are not
keys and values           with ``cp`` around a ring where attention is Transformer Engine's, as Megatron-LM has it,
                          else gathered
``zero``                  3 with an ``fsdp`` group, else what ``optimizer`` says, else 0; the group (``zero group``) is
                          all replicas
``overlap``               gradients with backward, parameters with forward, but for DeepSpeed's pipeline engine,
                          which sums after all else; tensor parallelism not
``attention``             unfused with float16, which runs of its time had; else fused: cuDNN's kernels from Hopper
                          on, FlashAttention-2 before; ``flash`` of no version is the first
``etp``                   ``tp``
``dispatcher``            experts' tokens are sorted by kernels of their own; with DeepEP they are not
``precision``             16-bit products in the device's format, float32 state
``heads``                 of 128 numbers each; ``kv_heads`` as many as heads; ``head_dim`` hidden by heads
``ffn``                   4 times hidden; gated 8/3, rounded up to 256
``vocab``                 51,200; a model of one layer is that layer alone, without vocabulary and optimizer
``gated_mlp``, ``tied``   no
``gpu_mem_gb``            that of the family's usual device
``gpus_per_node``         8; 72 where an NVL72 domain is named
``intra_node``            the device's links to a switch; PCIe of its generation where that is named, or NVLink denied
``inter_node``            those of the catalog's cluster of the device; a rate that says neither is a node's,
                          InfiniBand's an adapter's
========================  =========================================================================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pipeplan.costs.clusters import CLUSTERS, TESTBEDS, named_cluster
from pipeplan.costs.devices import DevicePreset, device_meant
from pipeplan.costs.uniform.choices import choices
from pipeplan.costs.uniform.free_text import (
    Again,
    Unsaid,
    attention_meant,
    hides_gradients,
    hides_tensor_messages,
    level_meant,
    link_meant,
    optimizer_meant,
    plain,
    recipe_meant,
    recomputed,
    schedule_meant,
    unprinted,
)
from pipeplan.costs.uniform.layer import WIDTH
from pipeplan.costs.uniform.shares import Shares, catalog_shares, machine_of, shares_for, usual_attention
from pipeplan.costs.uniform.state import bytes_of
from pipeplan.costs.uniform.words import Machine, Transformer, UniformLayout

_MOST = 10**9
_VOCABULARY = 51_200
_OTHER_ADAPTER = 12_500_000_000
_OMNI_PATH_GBITS = 100


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A run in our words, on a device of the catalog; ``assumed`` has what its source does not print."""

    model: Transformer
    layout: UniformLayout
    machine: Machine
    device: str
    assumed: tuple[str, ...]

    @property
    def is_dense(self) -> bool:
        """Without experts."""
        return not self.model.experts

    @property
    def is_16_bit(self) -> bool:
        """Products are in bfloat16 or float16."""
        return bool(self.layout.recipe != "fp8-mixed")

    def at(self, shares: Shares) -> PublishedRun:
        """With other shares of the device's rates."""
        reached = replace(self.machine, matrix_share=shares.matrix, bandwidth_share=shares.bandwidth)
        return replace(self, machine=reached)


def read_run(row: Mapping[str, Any]) -> PublishedRun:
    """A row in our words.

    Raises:
        Unsaid: they cannot say it.
    """
    reader = _Fields(row)
    hardware = reader.part("hardware")
    device = _device(hardware)
    model = _model(reader.part("model"), reader)
    layout = _layout(reader, model, device)
    machine = _machine(hardware, device, layout)
    assumed = (*reader.assumed, *hardware.assumed)
    return PublishedRun(model, layout, machine, device.name, tuple(dict.fromkeys(assumed)))


@dataclass
class _Fields:
    """Fields of a table, each checked as it is read."""

    table: Mapping[str, Any]
    assumed: list[str] = field(default_factory=list)

    def part(self, key: str) -> _Fields:
        value = self.table.get(key)
        if not isinstance(value, Mapping):
            raise Unsaid(f"{key} is not printed" if value is None else f"{key} is no table")
        return _Fields(value, self.assumed)

    def number(self, key: str, usual: float | None = None, *, least: float = 1, noted: bool = True) -> float:
        """A number of at least ``least``; where it is not printed the usual one, without one the run cannot be said."""
        value = self.table.get(key)
        if value is None:
            if usual is None:
                raise Unsaid(f"{key} is not printed")
            if noted:
                self.assumed.append(key)
            return usual
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Unsaid(f"{key} is no number")
        if not least <= value <= _MOST:
            raise Unsaid(f"{key} is {value}, not from {least} to {_MOST}")
        return value

    def count(self, key: str, usual: float | None = None, *, least: float = 1, noted: bool = True) -> int:
        """A whole number."""
        value = self.number(key, usual, least=least, noted=noted)
        if value != int(value):
            raise Unsaid(f"{key} is {value}, no whole number")
        return int(value)

    def text(self, key: str) -> str:
        """In small letters; empty where it is not printed."""
        value = self.table.get(key)
        if value is not None and not isinstance(value, str):
            raise Unsaid(f"{key} is no text")
        return (value or "").lower()

    def flag(self, key: str, usual: bool) -> bool:
        value = self.table.get(key)
        if value is None:
            self.assumed.append(key)
            return usual
        if not isinstance(value, bool):
            raise Unsaid(f"{key} is neither true nor false")
        return value


# The model ----------------------------------------------------------------------------------------------------------


def _model(table: _Fields, row: _Fields) -> Transformer:
    layers, hidden = table.count("layers"), table.count("hidden")
    heads = table.count("heads", -(-hidden // 128))
    gated = table.flag("gated_mlp", False)
    usual = -(-8 * hidden // 3 // 256) * 256 if gated else 4 * hidden
    sparse = table.text("arch") == "moe" or table.count("experts", 0, least=0, noted=False) > 1
    latent = table.part("mla") if table.table.get("mla") is not None else None
    experts: dict[str, int] = {}
    if sparse:
        experts = {
            "experts": table.count("experts"),
            "top_k": table.count("topk"),
            "moe_ffn": table.count("moe_ffn"),
            "shared_ffn": table.count("shared_expert_ffn", 0, least=0),
        }
        if experts["top_k"] > experts["experts"]:
            raise Unsaid(f"topk is {experts['top_k']}, more than {experts['experts']} experts")
    if latent is not None:
        experts |= {
            "query_rank": latent.count("q_lora_rank", 0, least=0),
            "latent_rank": latent.count("kv_lora_rank"),
            "rotary_size": latent.count("qk_rope_dim"),
            "value_size": latent.count("v_head_dim"),
        }
    size = table if latent is None else _Fields({"head_dim": latent.count("qk_head_dim")}, table.assumed)
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=table.count("kv_heads", heads),
        head_size=size.count("head_dim", -(-hidden // heads)),
        ffn=table.count("ffn", usual),
        gated=int(gated),
        vocabulary=table.count("vocab", _VOCABULARY) * (layers > 1),
        tied=int(table.flag("tied_embeddings", False)),
        sequence=row.count("seq"),
        **experts,
    )


# The layout ---------------------------------------------------------------------------------------------------------


def _layout(row: _Fields, model: Transformer, device: DevicePreset) -> UniformLayout:
    tensor, pipeline, context = (row.count(key, 1) for key in ("tp", "pp", "cp"))
    data, left = divmod(row.count("gpus"), tensor * pipeline * context)
    if left or not data:
        raise Unsaid(f"{row.count('gpus')} gpus are not a multiple of tp {tensor} x pp {pipeline} x cp {context}")
    microbatch = row.count("micro_batch")
    batch = row.count("global_batch", _batch_of_microbatches(row, microbatch * data), noted=False)
    if batch < microbatch * data:
        raise Unsaid(f"global_batch is {batch}, less than micro_batch {microbatch} on each of {data} replicas")
    schedule, chunks = _schedule(row, pipeline)
    if pipeline > model.layers:
        raise Unsaid(f"pp is {pipeline}, more than {model.layers} layers")
    if pipeline * chunks > model.layers + 2:  # the embedding and the head may be chunks of their own
        raise Unsaid(f"pp {pipeline} x vp {chunks} are more chunks than {model.layers} layers")
    divided = row.flag("sequence_parallel", not _in_deepspeed(row))
    zero, group = _zero(row, data * context)
    recipe, again = _recipe(row, device), _again(row, model.layers / pipeline)
    return UniformLayout(
        tensor=tensor,
        pipeline=pipeline,
        chunks=chunks,
        context=context,
        data=data,
        microbatch=microbatch,
        global_batch=math.ceil(batch / (data * microbatch)) * data * microbatch,
        ring=_ring(row) if context > 1 else 0,
        **_experts(row, model, tensor, data * tensor * context),
        zero=zero,
        zero_group=group,
        sequence_parallel=int(tensor > 1 and divided),
        again_core=again.core,
        again_up=again.up,
        again_products=again.products,
        again_elementwise=again.elementwise,
        **_overlaps(row),
        gradient_bytes=_gradient_bytes(row, recipe, data * context, zero),
        schedule=schedule,
        recipe=recipe,
        optimizer=_optimizer(row),
        attention=_attention(row, device, recipe),
    )


def _batch_of_microbatches(row: _Fields, samples: int) -> float | None:
    if row.table.get("num_microbatches") is None:
        return None
    return row.count("num_microbatches") * samples


def _experts(row: _Fields, model: Transformer, tensor: int, devices: int) -> dict[str, int]:
    if not model.experts:
        return {}
    expert, own = row.count("ep"), row.count("etp", tensor)
    if devices % (expert * own) or expert > model.experts:
        raise Unsaid(f"ep {expert} x etp {own} do not divide {devices} devices of a stage and {model.experts} experts")
    dispatcher = f"{row.text('overlap')} {row.text('attention')}"
    fused = "deepep" in dispatcher
    if not fused and "dispatch" not in dispatcher:
        row.assumed.append("dispatcher")
    return {"expert": expert, "expert_tensor": own, "fused_dispatch": int(fused)}


def _ring(row: _Fields) -> int:
    """Whether devices that share sequences send keys and values around a ring, instead of gathering them."""
    text = f"{row.text('attention')}; {row.text('overlap')}"
    if re.search(r"cp.comm.type\W*all.?gather|(keys?|kv)\b[^;,]*\bgather|gather\w*\b[^;,]*\b(keys?|kv)\b", text):
        return 0
    if re.search(r"cp.comm.type\W*p2p|\bring\b", text):
        return 1
    row.assumed.append("cp exchange")
    return int(bool(re.search(r"\bte\b|transformer engine", row.text("attention"))))


def _schedule(row: _Fields, pipeline: int) -> tuple[str, int]:
    """The schedule, and chunks of a stage: those that are printed, else those that the schedule's text says."""
    text = row.text("schedule")
    if pipeline == 1:
        if unprinted(plain(text)):
            row.assumed.append("schedule")
        row.count("vp", 1)
        return "1f1b", 1
    meant = schedule_meant(text)
    if not meant.named:
        row.assumed.append("schedule")
    chunks = row.count("vp", meant.chunks)
    if meant.name != "1f1b" and chunks != meant.chunks:
        raise Unsaid(f"vp is {chunks}; {meant.name} has a closed form for {meant.chunks} of a stage alone")
    return meant.name, chunks


def _zero(row: _Fields, replicas: int) -> tuple[int, int]:
    """The level, and how many devices it is over: FSDP's group, of ZeRO what ``over N ranks`` says, else all."""
    text, group = row.text("optimizer"), row.count("fsdp", 0, least=0, noted=False)
    level = row.count("zero", 3 if group else level_meant(text), least=0)
    if level > 3:
        raise Unsaid(f"zero is {level}; levels are 0 to 3")
    over = re.search(r"over ([1-9]\d{0,8})\b", text)
    if level and replicas > 1 and not group and not over and not re.search(r"over all|all (?:dp )?ranks", text):
        row.assumed.append("zero group")
    group = group or (int(over.group(1)) if over else replicas)
    group = min(group, replicas) if level else 1
    if replicas % group:
        raise Unsaid(f"{replicas} replicas are not a multiple of the {group} that share their state")
    return level, group


def _recipe(row: _Fields, device: DevicePreset) -> str:
    """Of a text that does not say a format, state in 16 bits is in that of the device."""
    name, is_usual = recipe_meant(row.text("precision"), "fp16-mixed" if device.dtype == "float16" else "bf16-mixed")
    if is_usual:
        row.assumed.append("precision")
    if name == "fp8-mixed" and not device.fp8_flops_per_s:
        raise Unsaid(f"precision {row.text('precision')!r}: {device.name} has no products in FP8")
    return name


def _optimizer(row: _Fields) -> str:
    found = optimizer_meant(row.text("optimizer"))
    if found is None:
        row.assumed.append("optimizer")
    return found or "adamw"


def _gradient_bytes(row: _Fields, recipe: str, replicas: int, zero: int) -> int:
    """Bytes of a gradient in transit: bfloat16 if the run says so, otherwise those of the kept gradient.

    FSDP reduces in the format that computes where it is told no other (``reduce_dtype`` of torch's ``MixedPrecision``).
    """
    text = plain(f"{row.text('overlap')}; {row.text('optimizer')}; {row.text('precision')}")
    if re.search(r"bf16 grad|grad sync dtype\W*bf16|grad\w* (?:reduced )?in bf16|bf16 reduc", text):
        return 2
    if replicas > 1 and not re.search(r"(?:fp|float)-?32 grad|grad\w*[^,;]* (?:fp|float)-?32", text):
        row.assumed.append("gradient dtype")
        if zero == 3:
            return min(WIDTH, int(bytes_of(recipe).gradient))
    return int(bytes_of(recipe).gradient)


def _again(row: _Fields, layers_of_stage: float) -> Again:
    """What of a forward is computed again."""
    found = recomputed(row.text("recompute"), layers_of_stage)
    if not found.printed:
        row.assumed.append("recompute")
    if found.guessed:
        row.assumed.append("recomputed share")
    return found


def _overlaps(row: _Fields) -> dict[str, int]:
    """Which messages hide; DeepSpeed's pipeline engine sums gradients as an instruction of its own after all else."""
    overlap, optimizer = (row.text(key) for key in ("overlap", "optimizer"))
    gradients = hides_gradients(overlap)
    if gradients is None and re.search("overlap", optimizer):
        gradients = hides_gradients(optimizer)
    if gradients is None:
        row.assumed.append("overlap")
        gradients = not (unprinted(plain(overlap)) and _in_deepspeed(row))
    return {"overlap_tensor": int(hides_tensor_messages(overlap)), "overlap_data": int(gradients)}


def _in_deepspeed(row: _Fields) -> bool:
    """Whether DeepSpeed's pipeline engine ran it."""
    return bool(re.search("1f1b.*deepspeed", f"{row.text('schedule')}; {row.text('optimizer')}"))


def _attention(row: _Fields, device: DevicePreset, recipe: str) -> str:
    found, of_version = attention_meant(row.text("attention"))
    if not of_version:
        row.assumed.append("attention")
    return found or ("unfused" if recipe == "fp16-mixed" else usual_attention(device))


# The machine --------------------------------------------------------------------------------------------------------


def _device(hardware: _Fields) -> DevicePreset:
    text = hardware.text("gpu")
    if not text:
        raise Unsaid("hardware.gpu is not printed")
    memory = hardware.table.get("gpu_mem_gb")
    if memory is None and not re.search(r"\d\s?gi?b", text):
        hardware.assumed.append("gpu_mem_gb")
    found = device_meant(text, None if memory is None else hardware.number("gpu_mem_gb"))
    if found is None:
        raise Unsaid(f"there is no preset of {text!r}")
    return found


def _machine(hardware: _Fields, device: DevicePreset, layout: UniformLayout) -> Machine:
    intra = hardware.text("intra_node")
    domain = re.search(r"nvl ?([1-9]\d{0,8})\b", intra)
    printed = hardware.count("gpus_per_node", 8)
    node = int(domain.group(1)) if domain else printed
    link = link_meant(intra, device)
    if link is None:
        hardware.assumed.append("intra_node")
    return machine_of(
        device,
        shares_for(device.name, catalog_shares()),
        layout.attention,
        node=node,
        link_bytes_per_s=device.link_bytes_per_s if link is None else link,
        adapter_bytes_per_s=_adapter(hardware, device, printed),
    )


_NUMBERS = {"two": 2, "four": 4, "eight": 8, "sixteen": 16}


def adapter_meant(text: str, node: int) -> float | None:
    """Bytes per second that each device of a node of ``node`` has between nodes, by free text in small letters.

    ``gb/s`` is of bits where the rate is an adapter's as they are sold (25, 40, and 100 or more), else of bytes.
    """
    words = re.sub(r"\b(" + "|".join(_NUMBERS) + r")\b", lambda found: str(_NUMBERS[found.group()]), text)
    rate = re.search(r"(?<![\d.])(\d{1,9}(?:\.\d{1,9})?)\s*g(?:b|bit)s?(?:/s|ps)", words)
    if rate is None:
        links = re.search(r"\b([1-9]\d{0,8}) omni-?path", words)
        return int(links.group(1)) * _OMNI_PATH_GBITS * 1e9 / 8 / node if links else None
    value = float(rate.group(1))
    each = value * 1e9 if value < 100 and value not in (25, 40) else value * 1e9 / 8
    if each <= 0:
        return None
    count = re.search(r"(?<!\d)(\d{1,9})\s*(?:x\s*)?(?:\w+\s+)?$", words[: rate.start()])
    if count and int(count.group(1)):
        return int(count.group(1)) * each / node
    single = re.search(r"per (gpu|device|accelerator)", words) or (
        "infiniband" in words and not re.search(r"per (node|server|host)", words)
    )
    return each if single else each / node


@cache
def _adapters() -> dict[int, int]:
    """Rate of a device's link inside its node -> that of its adapter, of the catalog's clusters."""
    found: dict[int, int] = {}
    for name in CLUSTERS:
        if name not in TESTBEDS:
            inner, outer = named_cluster(name).levels
            found.setdefault(inner.bandwidth_bytes_per_s, outer.bandwidth_bytes_per_s)
    return found


def _adapter(hardware: _Fields, device: DevicePreset, node: int) -> float:
    """The printed rate, of which what it is of may be assumed, or that of the catalog's clusters."""
    text = hardware.text("inter_node")
    found = adapter_meant(text, node)
    if not found or not re.search(r"per |each|every|\b\d+\s?x|\w+ \w+ gb?/s|omni", text):
        hardware.assumed.append("inter_node")
    return found or choices().adapters.get(device.family) or _adapters().get(device.link_bytes_per_s, _OTHER_ADAPTER)
