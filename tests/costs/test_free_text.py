"""Free text of published runs, read by its words: as people write it, denials too."""

from __future__ import annotations

import pytest

from pipeplan.costs.devices import device_preset
from pipeplan.costs.uniform.free_text import (
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

RECIPES = {
    "bf16-mixed": [
        *("BF16", "bfloat16", "bf16-mixed", "BF16/FP16 mixed", 'FP16/BF16 mixed ("mixed precision")', "bf16 mixed"),
        *("BF16 (no FP8)", "BF16, fp8 off", "BF16 (FP8: false)", "BF16 without FP8", "not FP8, BF16", "non-FP8 BF16"),
        *("BF16 (FP8 disabled)", "BF16 (FP8 not used)", "bf16; fp8=None", "BF16 rather than FP8", "BF16 w/o FP8"),
        *("BF16 (fp32 grad accumulation, unsharded)", "BF16 params, FP32 master weights", "BF16 (default)"),
        *("BF16 with FP8 all-gather", "Megatron BF16 (megatron_amp_O2: true)", "BF16, not using fp16", "bf16_mixed"),
        *("BF16 compute, FP32 optimizer states", "BF16 (int8 optimizer states)", "BF16: FP8 turned off"),
        *("BF16-only (FP8 available but unused)", "BF16 (FP8 results are in another table)", "BF16 excluding FP8"),
    ],
    "bf16-autocast": [
        *("BF16 (amp_bf16, FSDP mixed_precision DEFAULT)", "FSDP mixed_precision DEFAULT", "FSDP DEFAULT", "DEFAULT"),
        *("amp_bf16", "torch.autocast bfloat16", "BF16 autocast", "mixed_precision: DEFAULT", "BF16, FSDP DEFAULT"),
    ],
    "bf16": [
        *("BF16 (amp_bf16, FSDP mixed_precision PURE)", "FSDP mixed_precision PURE", "FSDP PURE", "PURE", "pure bf16"),
        *("bf16-true", "amp_bf16 PURE (no fp8)", "BF16 without FP32 master weights", "BF16, no master weights"),
    ],
    "fp16-mixed": [
        *("FP16", "fp16 mixed precision", "half precision", "float16", "FP16 (not BF16)", "fp16, bf16: false"),
        "FP16 (script pretrain_zero_bubble.sh uses --fp16; not restated in paper)",
    ],
    "fp8-mixed": [
        *("FP8", "FP8 (current scaling), BF16 elsewhere", "fp8-mixed", "MXFP8", "float8 rowwise", "FP8_hybrid"),
        *("BF16 + FP8 (Transformer Engine)", "FP8 (E4M3)", "BF16 with FP8 GEMMs", "FP8, BF16 optimizer"),
    ],
}


@pytest.mark.parametrize(("recipe", "text"), [(name, text) for name, texts in RECIPES.items() for text in texts])
def test_precision(recipe: str, text: str) -> None:
    assert recipe_meant(text.lower()) == (recipe, False)


@pytest.mark.parametrize(
    "text",
    [
        *("", "16-bit", "16 bit", "16-bit mixed", "mixed precision", "mixed", "AMP", "16-mixed", "amp O2"),
        *("no FP8", "fp8 off", "without FP8", "n/a", "not stated", "unknown"),
    ],
)
def test_16_bits_are_of_the_devices_format(text: str) -> None:
    assert recipe_meant(text.lower(), "fp16-mixed") == ("fp16-mixed", True)
    assert recipe_meant(text.lower()) == ("bf16-mixed", True)


@pytest.mark.parametrize("text", ["FP32", "TF32", "MXFP4", "nvfp4", "int8", "FP32, no FP8", "something"])
def test_precision_of_other_bits(text: str) -> None:
    with pytest.raises(Unsaid, match="products are in neither 8 nor 16 bits"):
        recipe_meant(text.lower())


SCHEDULES = {
    ("1f1b", 1): [
        *("1F1B", "GPipe", "non-interleaved 1F1B", "not interleaved", "1F1B (not interleaved)", "noninterleaved 1F1B"),
        *(
            "interleaved 1F1B when VP>1",
            "interleaved 1F1B if VP>1",
            "1F1B (interleaved where vp > 1)",
            "PipeDream-flush",
        ),
        *("1F1B without interleaving", "1F1B, interleaving off", "1F1B (no interleaving)", "interleaved: false, 1F1B"),
        *("one-forward-one-backward", "1F1B, no virtual pipeline", "AFAB", "1F1B (DeepSpeed pipeline engine)"),
        *("1F1B, zero bubble off", "1F1B with asynchronous P2P", "interleaving disabled", "interleaved for VP>1"),
        *(
            "uninterleaved 1F1B",
            "1F1B (VP=1)",
            "1F1B (VP off)",
            "no zero bubble",
            "DAPPLE",
            "1F1B instead of interleaved",
        ),
    ],
    ("1f1b", 2): [
        *("interleaved 1F1B", "1F1B-I", "interleaved VPP", "Interleaved1F1B", "looped BFS", "interleaved schedule"),
        *("interleaved 1F1B (not zero bubble)", "virtual pipeline stages", "interleaved 1f1b, GPipe not used"),
    ],
    ("1f1b", 4): [
        "interleaved 1F1B (VP=4)",
        "interleaved, 4 virtual stages",
        "1F1B VPP 4",
        "interleaved with vp 4",
        "VP 4",
    ],
    ("zb-1p", 1): ["ZB-1p", "ZB-H1", "zero bubble", "zero-bubble", "ZBH1"],
    ("zb-2p", 1): ["ZB-2p", "ZB-2p (half micro-batch)", "ZB-H2", "zero bubble H2"],
    ("zb-v", 2): ["ZB-V", "ZBV", "ZBVZeroBubble", "zero-bubble V"],
}


@pytest.mark.parametrize(("found", "text"), [(found, text) for found, texts in SCHEDULES.items() for text in texts])
def test_schedule(found: tuple[str, int], text: str) -> None:
    meant = schedule_meant(text.lower())
    assert (meant.name, meant.chunks, meant.named) == (*found, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "n/a",
        "not stated",
        "default",
        "Megatron-LM default",
        "PyTorch pipelining",
        "-",
        "unknown",
        "off",
        "disabled",
    ],
)
def test_schedule_that_is_not_named(text: str) -> None:
    meant = schedule_meant(text.lower())
    assert (meant.name, meant.chunks, meant.named) == ("1f1b", 1, False)


@pytest.mark.parametrize("text", ["DualPipe", "Hanayo", "V-Half", "Chimera", "bidirectional pipeline", "a new one"])
def test_schedule_without_closed_form(text: str) -> None:
    with pytest.raises(Unsaid, match="is not one with a known closed form"):
        schedule_meant(text.lower())


NOTHING, CORE, EVERYTHING = (0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 1.0, 1.0)
AGAIN = {
    NOTHING: [
        *("none", "None", "nothing", "n/a", "N/A", "off", "disabled", "no", "false", "null", "without recomputation"),
        *(
            "none (checkpoint=False)",
            "baseline-norecompute",
            "no recompute",
            "not used",
            "activation checkpointing off",
        ),
        *(
            "no activation checkpointing",
            "activation checkpointing: none",
            "activation recomputation disabled",
            "w/o AC",
        ),
        *("recompute_layers=0", "activations_checkpoint_granularity: null", "gradient checkpointing is not enabled"),
        *("no gradient/activation checkpointing", "seqparallel-norecompute", "no-recompute", "checkpointing=False"),
        *("none for H100 (csv recompute_layers=0); not stated for GB200", "nothing recomputed", "no full recompute"),
        *("all activations kept", "remat policy everything_saveable", "not recomputed", "AC disabled", "remat: off"),
        *(
            "selective recomputation disabled",
            "neither selective nor full recomputation",
            "no (fits in memory)",
            "recompute nothing",
            "doesn't recompute",
            "checkpoint-activations off",
            "0 layers",
        ),
        *("Full recomputation off", "recompute: False", "activation_checkpointing: false", "recompute turned off"),
        "none (recompute_layers=0 in NeMo r2.3.0 scripts/performance/model_configs_h100.csv for the same layout)",
    ],
    CORE: [
        *("selective", "selective (attention core) with sequence parallelism", "selective, not full", "core attention"),
        *("selective+sp", "no full recompute, selective only", "selective (no full recompute)", "selective only"),
        "yaml says activations_checkpoint_granularity: selective (attention core); NVTE_FUSED_ATTN=0 set",
        *("recompute_modules: core_attn", "--recompute-granularity selective", "attention recompute only"),
    ],
    EVERYTHING: [
        *("full", "full, every layer", "remat policy full", "FSDP activation checkpointing per block", "every layer"),
        *("full (no sequence parallelism)", "uniform, 1 layer", "full (not selective)", "checkpointing", "True", "on"),
        *("activation_checkpointing: true in the current recipe yaml (may differ from the run)", "remat", "enabled"),
        *("full (--checkpoint-activations, DeepSpeed activation checkpointing)", "remat policy nothing_saveable"),
        *("activation checkpointing, use_reentrant: false", "no sequence parallelism, full", "baseline-fullrecompute"),
        *("full (offloading off)", "per-block checkpointing", "gradient checkpointing enabled", "yes"),
    ],
    (0.5, 0.5, 0.5): [
        *(
            "selective layer",
            "every other layer",
            "every 2nd layer",
            "selective (per-block fraction; ratio not stated)",
        ),
        *("block, 4 layers", "5 of 10 layers", "50 % of layers", "half of the layers", "full, block, 4 layers"),
    ],
    (0.25, 0.25, 0.25): ["every 4th layer", "full, 2 layers per stage", "recompute_num_layers=2", "1/4 of layers"],
    (0.0, 0.5, 1.0): ["selective op", "selective AC (op)"],
    (0.0, 0.0, 1.0): [
        "selective modules: norm, act, shared_expert",
        "selective (norm, act)",
        "remat policy minimal_flash",
    ],
}


@pytest.mark.parametrize(("again", "text"), [(found, text) for found, texts in AGAIN.items() for text in texts])
def test_recomputation(again: tuple[float, ...], text: str) -> None:
    found = recomputed(text.lower(), 8)
    assert found.printed
    assert (found.core, found.products, found.elementwise) == again


@pytest.mark.parametrize("text", ["", "not stated", "unknown"])
def test_recomputation_that_is_not_printed(text: str) -> None:
    found = recomputed(text, 8)
    assert not found.printed
    assert found.core == found.products == 0


@pytest.mark.parametrize("text", ["some", "offloading"])
def test_recomputation_of_nobody_knows_what(text: str) -> None:
    with pytest.raises(Unsaid, match="does not say what is computed again"):
        recomputed(text, 8)


@pytest.mark.parametrize(
    ("text", "guessed"),
    [
        ("selective layer", True),
        ("selective op", True),
        ("recompute_modules mla_up_proj, mlp", True),
        ("every 2nd layer", False),
        ("full", False),
    ],
)
def test_shares_that_are_not_printed_are_guessed(text: str, guessed: bool) -> None:
    assert recomputed(text, 8).guessed is guessed


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((text, "adamw") for text in ("AdamW", "Adam", "distributed_fused_adam (ZeRO-1)", "FusedAdam", "LAMB")),
        *(
            (text, "momentum")
            for text in ("SGD with momentum", "momentum", "SGD, Nesterov", "Lion", "SGD momentum 0.9")
        ),
        *((text, "sgd") for text in ("SGD", "plain SGD", "SGD without momentum", "SGD (no momentum)", "SGD, not Adam")),
        *((text, None) for text in ("", "DeepSpeed ZeRO-1", "FSDP2", "8-bit Adam", "Adafactor", "Muon", "none")),
    ],
)
def test_optimizer(text: str, kind: str | None) -> None:
    assert optimizer_meant(text.lower()) == kind


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("ZeRO-1", 1),
        ("DeepSpeed ZeRO stage 2", 2),
        ("zero3", 3),
        ("PyTorch FSDP FULL_SHARD", 3),
        ("FSDP SHARD_GRAD_OP", 2),
        ("distributed optimizer", 1),
        ("replicated Adam (no distributed optimizer in 2021)", 0),
        ("AdamW without ZeRO-3", 0),
        ("AdamW", 0),
    ],
)
def test_level_of_sharding(text: str, level: int) -> None:
    assert level_meant(text.lower()) == level


@pytest.mark.parametrize(
    ("device", "text", "rate"),
    [
        ("a100-80gb", "NVLink 4 inter-gpu connects", 100e9),
        ("a100-80gb", "NVLink 4th generation", 300e9),
        ("a100-80gb", "NVLink+NVSwitch", 300e9),
        ("a100-80gb", "NVLink 40 links", 300e9),
        ("v100-32gb", "2 NVLinks between GPUs", 50e9),
        ("h100-80gb", "NVLink (DGX H100; links not restated in source)", 450e9),
        ("h100-80gb", "NVLink inside, PCIe Gen5 to the NICs", 450e9),
        ("h100-80gb", "PCIe Gen4", 31.5e9),
        ("h100-80gb", "PCIe", 63e9),
        ("h100-80gb", "PCI Express 5.0 x16", 63e9),
        ("a100-80gb", "PCIe 4.0 x8", 15.75e9),
        ("a100-80gb", "PCIe (no NVLink)", 31.5e9),
        ("a100-80gb", "no NVLink", 31.5e9),
        ("a100-pcie-80gb", "PCIe, NVLink bridge between pairs", 31.5e9),
        ("v100-32gb", "PCIe", 15.75e9),
        ("l40s-48gb", "PCIe Gen4", 31.5e9),
        ("h100-80gb", "not stated", None),
        ("h100-80gb", "", None),
        ("h100-80gb", "single node", None),
    ],
)
def test_links_inside_a_node(device: str, text: str, rate: float | None) -> None:
    assert link_meant(text.lower(), device_preset(device)) == rate


@pytest.mark.parametrize("text", ["", "Not stated in heading", "unknown", "N/A", "-", "not restated", "unspecified"])
def test_what_says_nothing_is_not_printed(text: str) -> None:
    assert unprinted(plain(text))
    assert not unprinted(plain(f"NVLink ({text} in source)"))


ATTENTION = {
    ("unfused", True): [
        *("unfused (no flash)", "unfused, fused softmax kernel (no flash)", "no flash attention", "flash off", "eager"),
        *("flash: false", "not fused", "without FlashAttention", "non-flash", "flash not used", "standard attention"),
    ],
    ("flash-2", True): ["FlashAttention-2", "SDPA flash v2", "flash_attention_3", "FA2", "FA3", "NVTE_FUSED_ATTN=0"],
    ("flash-1", False): ["flash (attn_impl flash)", "flash, samples packed into one", "FlashAttention"],
    ("cudnn", True): [
        "TE fused/flash attention",
        "TE + DeepEP + FlexAttn",
        "cuDNN",
        "TE, flash disabled",
        "not unfused, TE",
    ],
    (None, False): ["", "not stated", "PyTorch SDPA", "xformers"],
}


@pytest.mark.parametrize(("found", "text"), [(found, text) for found, texts in ATTENTION.items() for text in texts])
def test_attention(found: tuple[str | None, bool], text: str) -> None:
    assert attention_meant(text.lower()) == found


@pytest.mark.parametrize(
    ("text", "tensor", "gradients"),
    [
        ("overlap_grad_reduce/overlap_param_gather, bf16 grad reduce, TP userbuffer overlap", True, True),
        ("recipe: overlap_grad_reduce False", False, False),
        ("DDP-impl local (no grad all-reduce overlap); scatter/gather p2p", False, False),
        ("--overlap-grad-reduce --overlap-param-gather, --tp-comm-overlap", True, True),
        ("no TP overlap, overlap_grad_reduce", False, True),
        ("tp_comm_overlap: false, overlap_grad_reduce: true", False, True),
        ("TP comm overlap disabled", False, None),
        ("without userbuffers", False, None),
        ("async TP off", False, None),
        ("async TP", True, None),
        ("overlap disabled", False, False),
        ("not overlapped", False, False),
        ("communication is not overlapped", False, False),
        ("none", False, False),
        ("n/a", False, None),
        ("", False, None),
        ("dispatcher DeepEP", False, None),
        ("overlap_sync_grad True (config)", False, True),
    ],
)
def test_messages_that_hide(text: str, tensor: bool, gradients: bool | None) -> None:
    assert (hides_tensor_messages(text.lower()), hides_gradients(text.lower())) == (tensor, gradients)
