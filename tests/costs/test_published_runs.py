"""Published runs: what is read of them and how, and how far predictions are from what they took."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.costs.devices import device_preset
from pipeplan.costs.uniform.fitting import FEWEST_LAYOUTS, fit_shares, layout_key
from pipeplan.costs.uniform.free_text import Unsaid
from pipeplan.costs.uniform.judging import Judged, fit_device, holds_runs, judge, left_out_errors, read_runs
from pipeplan.costs.uniform.published import adapter_meant, read_run
from pipeplan.costs.uniform.shares import catalog_shares, reaching, shares_for
from pipeplan.errors import FileError, UsageError
from support.marks import some_of

RUNS = Path(__file__).parents[2] / "benchmarks" / "data" / "published-runs.json"


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    return read_runs(RUNS)


@pytest.fixture(scope="module")
def judged(rows: list[Any]) -> list[Judged]:
    return judge(rows)


@pytest.fixture(scope="module")
def told(judged: list[Judged]) -> list[Judged]:
    return [each for each in judged if each.error is not None]


def _mean(errors: list[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


def _mean_of_layouts(runs: list[Judged], errors: dict[str, float]) -> float:
    by_layout: dict[object, list[float]] = {}
    for each in runs:
        by_layout.setdefault(layout_key(each.known), []).append(errors[each.id])
    return sum(map(_mean, by_layout.values())) / len(by_layout)


def test_nine_of_ten_runs_are_said_and_the_others_say_why(judged: list[Judged]) -> None:
    unsaid = [each for each in judged if each.predicted_s is None]
    assert len(unsaid) <= len(judged) / 10
    assert {each.why_not for each in unsaid} == {"micro_batch is not printed", "ep is not printed"}


def test_dense_runs_are_within_their_bounds(told: list[Judged]) -> None:
    dense = [each for each in told if each.is_dense and each.is_16_bit]
    errors = {each.id: each.error or 0.0 for each in dense}
    assert len(dense) > 180
    assert _mean(list(errors.values())) <= 0.05
    assert _mean_of_layouts(dense, errors) <= 0.052
    assert sum(abs(each) <= 0.2 for each in errors.values()) >= 0.95 * len(dense)


@pytest.mark.slow
def test_sources_left_out_of_the_fit(told: list[Judged]) -> None:
    sources = sorted({each.source for each in told})
    errors = left_out_errors(told, [[each] for each in sources])
    assert _mean([errors[each.id] for each in told if each.is_dense]) <= 0.065
    assert _mean([errors[each.id] for each in told if not each.is_dense]) <= 0.2


def test_the_catalog_has_what_fits_these_runs(told: list[Judged]) -> None:
    found = fit_shares([each.measured for each in told])
    assert found == catalog_shares()
    assert all(each.layouts >= FEWEST_LAYOUTS for each in found.values())
    assert shares_for("gb300-279gb", found).whose == "gb200-186gb"
    assert shares_for("h100-96gb", found).whose == "h100-80gb"
    assert shares_for("a100-80gb", {}).whose == "nobody"


def test_a_kind_with_few_layouts_is_not_fitted(told: list[Judged]) -> None:
    few = [each.measured for each in told if each.known.device == "h100-96gb"]
    assert few
    assert not fit_shares(few)


# What is read -------------------------------------------------------------------------------------------------------

READ = {
    *("model", "seq", "hardware", "gpus", "global_batch", "micro_batch", "num_microbatches", "tp", "pp", "vp", "cp"),
    *("ep", "etp", "dp", "schedule", "sequence_parallel", "zero", "fsdp", "recompute", "precision", "optimizer"),
    *("overlap", "attention"),
}
MODEL_READ = {
    *("arch", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated_mlp", "vocab", "tied_embeddings"),
    *("experts", "topk", "moe_ffn", "shared_expert_ffn", "mla"),
}


def test_nothing_else_is_read(rows: list[Any], judged: list[Judged]) -> None:
    nonsense = []
    for place, row in enumerate(deepcopy(rows)):
        kept = {key: value if key in READ else [place, "nonsense"] for key, value in row.items()}
        kept["model"] = {key: value if key in MODEL_READ else place for key, value in row["model"].items()}
        nonsense.append(kept | {"unknown": "key", "tier": "?", "step_s": 1.0 + place})
    for one, other in zip(judged, judge(nonsense), strict=True):
        assert (one.predicted_s, one.predicted_bytes, one.assumed, one.why_not) == (
            other.predicted_s,
            other.predicted_bytes,
            other.assumed,
            other.why_not,
        )


def _row() -> dict[str, Any]:
    return {
        "id": "a-run",
        "model": {
            "arch": "dense",
            "layers": 32,
            "hidden": 4096,
            "heads": 32,
            "kv_heads": 8,
            "head_dim": 128,
            "ffn": 14336,
            "gated_mlp": True,
            "vocab": 128256,
            "tied_embeddings": False,
        },
        "seq": 8192,
        "hardware": {
            "gpu": "H100 SXM",
            "gpu_mem_gb": 80,
            "gpus_per_node": 8,
            "intra_node": "NVLink",
            "inter_node": "400 Gb/s per GPU",
        },
        "gpus": 16,
        "global_batch": 128,
        "micro_batch": 1,
        "tp": 2,
        "pp": 2,
        "vp": 1,
        "cp": 1,
        "schedule": "1F1B",
        "sequence_parallel": True,
        "zero": 1,
        "recompute": "none",
        "precision": "BF16 (FP32 gradients)",
        "optimizer": "AdamW, ZeRO-1 over all DP ranks",
        "overlap": "overlap_grad_reduce",
        "attention": "TE fused attention",
    }


def test_what_is_printed_is_not_assumed() -> None:
    run = read_run(_row())
    assert run.assumed == ()
    assert (run.layout.data, run.layout.zero_group, run.layout.attention) == (4, 4, "cudnn")
    assert run.machine.adapter_bytes_per_s == 50e9


ASSUMED = [
    ("schedule", "1f1b", lambda run: run.layout.schedule),
    ("vp", 1, lambda run: run.layout.chunks),
    ("recompute", 0.0, lambda run: run.layout.again_products),
    ("sequence_parallel", 1, lambda run: run.layout.sequence_parallel),
    ("overlap", (0, 1), lambda run: (run.layout.overlap_tensor, run.layout.overlap_data)),
    ("attention", "cudnn", lambda run: run.layout.attention),
    ("precision", "bf16-mixed", lambda run: run.layout.recipe),
    ("model.vocab", 51_200, lambda run: run.model.vocabulary),
    ("model.heads", 32, lambda run: run.model.heads),
    ("model.ffn", 11_008, lambda run: run.model.ffn),
    ("optimizer", "adamw", lambda run: run.layout.optimizer),
    ("hardware.intra_node", 450e9, lambda run: run.machine.link_bytes_per_s),
    ("hardware.gpus_per_node", 8, lambda run: run.machine.node),
    ("hardware.gpu_mem_gb", 80e9, lambda run: run.machine.memory_bytes),
    ("model.head_dim", 128, lambda run: run.model.head_size),
    ("model.kv_heads", 32, lambda run: run.model.kv_heads),
    ("zero", 1, lambda run: run.layout.zero),
    ("hardware.inter_node", 50e9, lambda run: run.machine.adapter_bytes_per_s),
]


@pytest.mark.parametrize(("key", "value", "of"), ASSUMED)
@pytest.mark.parametrize("absent", [True, False])
def test_what_is_not_printed_is_assumed_and_said(key: str, value: object, of: Any, absent: bool) -> None:
    row = _row()
    table = row
    *path, last = key.split(".")
    for part in path:
        table = table[part]
    if absent:
        del table[last]
    else:
        table[last] = None
    run = read_run(row)
    assert of(run) == value
    assert last in run.assumed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"micro_batch": None}, "micro_batch is not printed"),
        ({"gpus": 15}, "15 gpus are not a multiple of tp 2 x pp 2 x cp 1"),
        ({"gpus": "many"}, "gpus is no number"),
        ({"tp": True}, "tp is no number"),
        ({"seq": -1}, "seq is -1, not from 1 to 1000000000"),
        ({"seq": math.nan}, "seq is no number"),
        ({"seq": 1.5}, "seq is 1.5, no whole number"),
        ({"global_batch": 2}, "global_batch is 2, less than micro_batch 1 on each of 4 replicas"),
        ({"pp": 8, "model": _row()["model"] | {"layers": 4}}, "pp is 8, more than 4 layers"),
        ({"zero": 4}, "zero is 4; levels are 0 to 3"),
        ({"fsdp": 3}, "4 replicas are not a multiple of the 3 that share their state"),
        ({"model": None}, "model is not printed"),
        ({"hardware": {"gpu": "TPU v5p"}}, "there is no preset of 'tpu v5p'"),
        ({"hardware": {}}, "hardware.gpu is not printed"),
        ({"schedule": "DualPipe"}, "schedule 'dualpipe' is not one with a known closed form"),
        (
            {"precision": "FP8", "hardware": {"gpu": "A100 SXM"}},
            "precision 'fp8': a100-80gb has no products in FP8",
        ),
        ({"schedule": "ZB-1p", "vp": 2}, "vp is 2; zb-1p has a closed form for 1 of a stage alone"),
        ({"schedule": "ZB-V", "vp": 3}, "vp is 3; zb-v has a closed form for 2 of a stage alone"),
        ({"schedule": "interleaved 1F1B", "vp": 18}, "pp 2 x vp 18 are more chunks than 32 layers"),
        ({"precision": "MXFP4"}, "precision 'mxfp4': products are in neither 8 nor 16 bits"),
        ({"recompute": "some"}, "recompute 'some' does not say what is computed again"),
        ({"model": _row()["model"] | {"arch": "moe"}}, "experts is not printed"),
        ({"model": _row()["model"] | {"experts": 8, "topk": 2, "moe_ffn": 1}}, "ep is not printed"),
    ],
)
def test_what_our_words_cannot_say(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsaid) as found:
        read_run(_row() | changes)
    assert str(found.value) == reason


@pytest.mark.parametrize(
    ("text", "tensor", "data"),
    [
        ("overlap_grad_reduce, TP userbuffer overlap", 1, 1),
        ("recipe: overlap_grad_reduce False", 0, 0),
        ("DDP-impl local (no grad all-reduce overlap); scatter/gather p2p", 0, 0),
        ("async TP", 1, 1),
        ("vanilla TP", 0, 1),
    ],
)
def test_overlap_by_its_words(text: str, tensor: int, data: int) -> None:
    layout = read_run(_row() | {"overlap": text}).layout
    assert (layout.overlap_tensor, layout.overlap_data) == (tensor, data)


def test_deepspeeds_pipeline_sums_gradients_after_all_else() -> None:
    assert read_run(_row() | {"overlap": None, "schedule": "1F1B (DeepSpeed)"}).layout.overlap_data == 0


def test_deepspeeds_pipeline_does_not_divide_sequences() -> None:
    row = _row() | {"sequence_parallel": None, "tp": 2, "pp": 2, "gpus": 8}
    assert read_run(row).layout.sequence_parallel == 1
    assert read_run(row | {"schedule": "1F1B (DeepSpeed)"}).layout.sequence_parallel == 0


def test_what_the_driver_shows_has_the_reserve() -> None:
    measured = {"memory_gb": 40.0, "memory_kind": "nvidia-smi, maximum"}
    shown, allocated = judge([_row() | {"measured": measured}, _row() | {"measured": {"memory_gb": 40.0}}])
    reserve = device_preset(shown.known.device).reserve_bytes
    assert shown.predicted_bytes == allocated.predicted_bytes
    assert reserve > 0
    assert shown.memory_error is not None
    assert allocated.memory_error is not None
    assert shown.memory_error - allocated.memory_error == pytest.approx(reserve / 40e9)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("4 Omni-Path links per node", 6.25e9),
        ("4 x 100 Gb/s RoCE per node", 6.25e9),
        ("8x Mellanox 200 Gb/s HDR InfiniBand HCAs per node", 25e9),
        ("InfiniBand HDR (Selene: eight 200 Gb/s HCAs per node for application traffic)", 25e9),
        ("InfiniBand 8x50 GB/s per node", 50e9),
        ('800 Gb/s ("800 Gbps")', 12.5e9),
        ("RDMA 400 Gb/s per GPU", 50e9),
        ("InfiniBand 400 Gb/s", 50e9),
        ("RoCE RDMA between 4 nodes", None),
        ("0 x 100 Gb/s per node", 1.5625e9),
        ("9" * 5000 + " Gb/s", None),
        ("", None),
    ],
)
def test_adapters_by_their_words(text: str, rate: float | None) -> None:
    assert adapter_meant(text.lower(), 8) == rate


def test_what_text_leaves_open_is_assumed_and_said() -> None:
    row = _row()
    open_texts = {
        "optimizer": ("DeepSpeed ZeRO-1", {"optimizer", "zero group"}),
        "recompute": ("selective op", {"recomputed share"}),
        "precision": ("no FP8", {"precision", "gradient dtype"}),
        "attention": ("flash", {"attention"}),
        "overlap": ("async TP", {"overlap"}),
        "schedule": ("Megatron-LM default", {"schedule"}),
    }
    for key, (text, assumed) in open_texts.items():
        assert set(read_run(row | {key: text}).assumed) == assumed, key
    for key in ("inter_node", "intra_node"):
        assert read_run(row | {"hardware": row["hardware"] | {key: "not stated"}}).assumed == (key,)
    sparse = row | {"model": row["model"] | {"experts": 8, "topk": 2, "moe_ffn": 64, "shared_expert_ffn": 0}, "ep": 2}
    assert read_run(sparse | {"etp": 1}).assumed == ("dispatcher",)


def test_words_change_what_is_predicted() -> None:
    """Each of these ran as if the word were not there, or as if it were not denied."""
    row = _row()

    def figures(**changes: object) -> tuple[float, float]:
        found = judge([row | changes])[0]
        assert found.predicted_s is not None
        assert found.predicted_bytes is not None
        return found.predicted_s, found.predicted_bytes

    usual = figures()
    for same in (
        {"precision": "BF16 (FP32 gradients, no FP8)"},
        {"schedule": "non-interleaved 1F1B", "vp": None},
        {"recompute": "activation checkpointing off"},
    ):
        assert figures(**same) == usual, same
    adamw, momentum, sgd = (figures(optimizer=f"{each}, ZeRO-1") for each in ("AdamW", "SGD with momentum", "SGD"))
    assert adamw == usual
    assert adamw[0] > momentum[0] > sgd[0]
    assert adamw[1] > momentum[1] > sgd[1]
    assert figures(hardware=row["hardware"] | {"intra_node": "PCIe Gen4"})[0] > 1.1 * usual[0]


def test_a_row_that_does_not_say_what_it_took_is_predicted_and_says_so() -> None:
    for more, reason in (({}, "step_s is not printed"), ({"step_s": "fast"}, "step_s is no positive number")):
        found = judge([_row() | more])[0].figures()
        assert (found["error"], found["why_not"]) == (None, reason)
        assert found["predicted_s"] > 0


def test_a_model_of_one_layer_is_that_layer_alone() -> None:
    row = _row() | {"pp": 1}
    row["model"]["layers"] = 1
    alone = judge([row | {"step_s": 1.0}])[0]
    assert alone.known.model.vocabulary == 0


@pytest.mark.parametrize("text", ["ZeRO-1 over 0 ranks", "ZeRO-1 over " + "9" * 5000])
def test_a_number_of_ranks_that_is_none(text: str) -> None:
    assert read_run(_row() | {"optimizer": text}).layout.zero_group == 4


def test_domains_wider_than_a_node() -> None:
    row = _row()
    row["hardware"] = {"gpu": "GB200", "gpus_per_node": 4, "intra_node": "NVLink NVL72 domain"}
    assert read_run(row).machine.node == 72


# Damaged rows -------------------------------------------------------------------------------------------------------

_ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=12),
    st.just([]),
    st.just({}),
    st.sampled_from(
        ["zb-v", "interleaved", "full", "fp8", "H100", "8x0 Gb/s", "nvl0", "nvlink 0 links", "over 0 ranks"]
    ),
)


@settings(max_examples=some_of(40))
@given(st.data())
def test_damaged_rows_say_why_not_and_predictions_are_numbers(data: st.DataObject) -> None:
    row = _row() | {"step_s": 1.0, "measured": {"memory_gb": 50}}
    row["model"] |= data.draw(st.sampled_from([{}, {"experts": 8, "topk": 2, "moe_ffn": 64}]))
    for _ in range(data.draw(st.integers(1, 3))):
        table = data.draw(st.sampled_from([row, row["model"], row["hardware"]]))
        if not isinstance(table, dict):
            continue
        table[data.draw(st.sampled_from([*READ, *MODEL_READ, "gpu", "inter_node", "intra_node", "step_s"]))] = (
            data.draw(_ANY)
        )
        if not isinstance(row.get("model"), dict) or not isinstance(row.get("hardware"), dict):
            break
    found = judge([row])[0]
    assert (found.why_not is None) == (found.error is not None)
    for value in (found.predicted_s, found.predicted_bytes):
        assert value is None or (math.isfinite(value) and value > 0)
    json.dumps(found.figures(), allow_nan=False)


@pytest.mark.parametrize("rows", [[None], [[]], ["text"], [{}], [{"model": 1}]])
def test_rows_that_are_no_runs(rows: list[Any]) -> None:
    assert judge(rows)[0].why_not


@pytest.mark.parametrize("text", ["", "{}", '{"runs": 1}', "1"])
def test_files_that_are_no_runs(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text)
    with pytest.raises(FileError):
        read_runs(path)


# Calibrating --------------------------------------------------------------------------------------------------------


def test_shares_fitted_to_runs_change_a_devices_curves_at_their_ends(rows: list[Any]) -> None:
    fit = fit_device(rows, "h100-96gb")
    assert fit.shares.whose == "h100-80gb"
    assert fit.after <= fit.before + 1e-3  # the catalog's are these runs' shares
    device = device_preset("h100-96gb")
    reached = reaching(device, fit.shares)
    assert reached.matrix_efficiency[-1][1] == pytest.approx(fit.shares.matrix)
    assert reached.memory_efficiency[-1][1] == pytest.approx(fit.shares.bandwidth)
    for one, other in zip(device.memory_efficiency, reached.memory_efficiency, strict=True):
        more = one[0] / device.bandwidth_bytes_per_s * (1 / fit.shares.bandwidth - 1 / device.memory_efficiency[-1][1])
        taken = [work / device.bandwidth_bytes_per_s / share for work, share in (one, other)]
        assert taken[1] - taken[0] == pytest.approx(more)  # a launch takes what it took


def test_runs_of_other_devices_calibrate_nothing(rows: list[Any]) -> None:
    with pytest.raises(UsageError, match="of 219 runs fewer than 5 layouts are on cpu or one like it"):
        fit_device(rows, "cpu")


def test_files_of_runs_and_profiles_are_told_apart(tmp_path: Path) -> None:
    assert holds_runs(RUNS)
    for text, holds in (('{"runs": []}', True), ('{"kind": "profile", "runs": []}', False), ("no JSON", False)):
        (tmp_path / "file").write_text(text)
        assert holds_runs(tmp_path / "file") is holds
    assert not holds_runs(tmp_path / "none")
