"""What ``run`` prints: losses that are not finite, and predicted beside measured."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace

import pytest

from builders.chains import chain_plan
from pipeplan.cli.output import Outputs
from pipeplan.cli.run_steps import Steps
from pipeplan.cli.run_verb import _tell, comparison_line, reason_line
from pipeplan.files import Plan
from pipeplan.runtime.decoding.options import DecodeOptions, DecodeOutcome
from pipeplan.runtime.launch.job import Evaluated, RunOptions, RunResult, Started, StepResult, WrittenText
from pipeplan.runtime.training.options import RunOutcome, TrainOptions
from pipeplan.units import format_ns
from runtime_support.decoding_rank import plan_of

FINE = StepResult(0, 2.5, 3_000_000, 0, 1.0)
LOST = StepResult(1, math.nan, 2_000_000, 0, 1.0)
STEEP = StepResult(2, 2.0, 2_000_000, 0, math.inf)


def trained(plan: Plan, result: RunResult) -> RunOutcome:
    return RunOutcome(plan, TrainOptions("gpt2-tiny"), result)


@pytest.mark.parametrize("quiet", [False, True])
def test_a_loss_that_is_not_finite_is_shown_and_told_once(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Steps(TrainOptions("gpt2-tiny", checkpoint="saved"), quiet=quiet)
    for step in (FINE, LOST, STEEP, LOST):
        shown.show(step)
    out, errors = capsys.readouterr()
    told = "step 1: the loss is nan; no checkpoint is written after this step"
    assert errors == f"pipeplan: warning: {told}\n"
    assert [line.partition("  gradients")[0] for line in out.splitlines()] == (
        [] if quiet else ["step 0  loss 2.5000", "step 1  loss nan", "step 2  loss 2.0000", "step 1  loss nan"]
    )


def test_gradients_that_are_not_finite_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    Steps(TrainOptions("gpt2-tiny"), quiet=True).show(STEEP)
    assert capsys.readouterr().err == "pipeplan: warning: step 2: the norm of gradients is inf\n"


def test_steps_say_their_throughput_and_the_time_that_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """As long as those so far, without the first, which warms up; evaluations count, too."""
    now, plan = [0.0], chain_plan(2, 2)
    shown = Steps(TrainOptions("gpt2-tiny", num_steps=203), quiet=False, clock=lambda: now[0])
    shown.plan = plan
    shown.show(Started(0, tokens_per_sample=8))
    for now[0], step in ((30.0, 0), (40.0, 1), (50.0, 2), (50.5, 202)):
        shown.show(StepResult(step, 2.5, 10**9, 0))
        if step == 1:
            now[0] = 41.0
            shown.show(Evaluated(step, 2.25, 3, 10**9))
    rates = f"{plan.mini_batch} samples/s  {8 * plan.mini_batch} tokens/s"
    assert capsys.readouterr().out.splitlines() == [
        f"step 0  loss 2.5000  iteration 1s  {rates}  101min left",
        f"step 1  loss 2.5000  iteration 1s  {rates}  34min left",
        "step 1  evaluation loss 2.2500  of 3 mini-batches, 1s",
        f"step 2  loss 2.5000  iteration 1s  {rates}  34min left",
        f"step 202  loss 2.5000  iteration 1s  {rates}",
    ]


def test_an_emulation_has_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    Steps(RunOptions(), quiet=False).show(StepResult(0, math.nan, 2_000_000, 0))
    assert capsys.readouterr() == ("step 0  iteration 2ms\n", "")


def test_a_terminal_shows_how_long_a_step_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a second; before anything else is said, and at the end, the line is gone. Nothing is for a file."""
    now, plan = [0.0], chain_plan(2, 2)
    shown = Steps(RunOptions(stretch=2.0), quiet=False, clock=lambda: now[0])
    predicted = format_ns(2 * plan.predicted.whole_ns)
    with shown.waiting(plan):
        now[0] = 3.0
        shown.look("in 0F1 (step 0, program counter 1 of 4)")
        assert capsys.readouterr() == ("", "")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        for now[0] in (4.0, 4.5):
            shown.look("in 0F1 (step 0, program counter 1 of 4)")
        said = f"\r4s so far, predicted {predicted}; rank 0 in 0F1 (step 0, program counter 1 of 4)\033[K\r"
        assert capsys.readouterr().err == said
        shown.show(StepResult(0, math.nan, 2_000_000, 0))
        assert capsys.readouterr() == ("step 0  iteration 2ms\n", "\r\033[K\r")
        now[0] = 5.0
        shown.look("in 0F0 (step 1, program counter 0 of 4)")
        assert capsys.readouterr().err == ""
        now[0] = 6.0
        shown.look("in 0F0 (step 1, program counter 0 of 4)")
        assert "\r1s so far" in capsys.readouterr().err
    assert capsys.readouterr().err == "\r\033[K\r"


def test_json_has_null_for_what_is_not_finite() -> None:
    outcome = trained(chain_plan(2, 2), RunResult((FINE, LOST, STEEP), (1, 1)))
    text = json.dumps(outcome.figures(), allow_nan=False)
    steps = json.loads(text, parse_constant=pytest.fail)["steps"]
    assert [(step["loss"], step["grad_norm"]) for step in steps] == [(2.5, 1.0), (None, 1.0), (2.0, None)]


def test_notebooks_show_times_and_losses() -> None:
    """Of many steps the first and the last ones."""
    plan = chain_plan(2, 2)
    html = str(trained(plan, RunResult((FINE, LOST, STEEP), (1, 1)))._repr_html_())
    assert html.startswith("<pre")
    assert "     1  nan         2ms\n     2  2           2ms" in html
    many = tuple(StepResult(step, 1.0 + step, 10**6, 0) for step in range(100))
    lines = trained(plan, RunResult(many, (1, 1))).text().splitlines()
    assert [line.split()[0] for line in lines[2:]] == [*"012", "...", *map(str, range(83, 100))]
    text = WrittenText((1, 2, 3), (10_000, 20_000, 40_000))
    decode = plan_of("gpt2-tiny", [""], [[0]], batch=1, groups=1, context=9)
    told = DecodeOutcome(decode, DecodeOptions(model="gpt2-tiny"), RunResult((), (0,), requests=(text,)))
    assert told.text().splitlines()[1] == "3 tokens: [1, 2, 3]"


def test_throughput_is_of_the_median_on_the_device_that_ran() -> None:
    """Two samples in 2 ms; a forward of 52 GFLOP three times for each, on two devices of 312 TFLOP/s.

    Of a model with other sizes than the plan's it is of its own tokens, and says nothing of FLOPs.
    """
    plan = chain_plan(2, 2)
    known = plan.provenance.model_copy(update={"tokens_per_sample": 16, "forward_flops_per_sample": 52 * 10**9})
    plan = plan.model_copy(update={"provenance": known})
    on_a100 = RunResult((FINE, STEEP, STEEP), (1, 1), {"device": "NVIDIA A100-SXM4-80GB"}, tokens_per_sample=16)
    options = TrainOptions("gpt2-tiny", device="cuda", precision="bf16-autocast")
    figures = RunOutcome(plan, options, on_a100).figures()
    assert figures["samples_per_second"] == pytest.approx(1000)
    assert figures["tokens_per_second"] == pytest.approx(16_000)
    assert figures["model_flops_utilisation"] == pytest.approx(3 * 52e9 * 1000 / (2 * 312e12)) == pytest.approx(0.25)
    for other in (
        TrainOptions("gpt2-tiny"),
        TrainOptions("gpt2-tiny", device="cuda"),
        TrainOptions("gpt2-tiny", device="cuda", precision="bf16-autocast", backend="gloo"),
    ):
        assert RunOutcome(plan, other, on_a100).figures()["model_flops_utilisation"] is None
    assert RunOutcome(plan, RunOptions(), on_a100).throughput is None
    for result, tokens in (
        (replace(on_a100, tokens_per_sample=4), 4000),
        (replace(on_a100, as_planned=False), 16_000),
        (replace(on_a100, tokens_per_sample=None), None),
    ):
        figures = RunOutcome(plan, options, result).figures()
        assert figures["tokens_per_second"] == (tokens and pytest.approx(tokens))
        assert figures["model_flops_utilisation"] is None


@pytest.mark.parametrize(("cores", "why"), [(1, "2 processes on 1 cores; "), (2, "")])
def test_a_run_that_is_off_says_why_and_what_shows_more(cores: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = chain_plan(2, 2)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    step = StepResult(0, 1.0, 2 * plan.predicted.makespan_ns, 0)
    outcome = trained(plan, RunResult((step,), ()))
    assert outcome.is_off
    why += (
        "the plan's actions are short (15ns on average), and the time that processes take between them is not "
        "predicted; "
    )
    said = reason_line(outcome, "my plan.json", "run.trace", local=True)
    assert said == f"{why}pipeplan simulate 'my plan.json' --measured run.trace shows where time went"
    said = reason_line(outcome, "p.json", None, local=True)
    assert said == f"{why}--trace FILE, then pipeplan simulate p.json --measured FILE, shows where time went"
    as_predicted = replace(step, iteration_ns=plan.predicted.makespan_ns)
    assert not trained(plan, RunResult((as_predicted,), ())).is_off
    assert not trained(plan, RunResult((), ())).is_off


@pytest.mark.parametrize(("others", "said"), [(None, False), (0.1, False), (1.31, True)])
def test_a_run_that_is_off_says_that_others_use_the_machine(others: float | None, said: bool) -> None:
    plan = chain_plan(2, 2)
    step = StepResult(0, 1.0, 2 * plan.predicted.makespan_ns, 0)
    outcome = replace(trained(plan, RunResult((step,), ())), others_cores=others)
    words = f"other processes use this machine (1.3 of {os.cpu_count()} cores during the run); "
    assert (words in reason_line(outcome, "p.json", None, local=True)) is said


def test_predicted_beside_the_median_without_the_first_step() -> None:
    plan = chain_plan(2, 2)
    predicted = plan.predicted.makespan_ns
    times = [9 * predicted, predicted, 2 * predicted, 3 * predicted]
    many = RunResult(tuple(StepResult(step, 1.0, ns, 0) for step, ns in enumerate(times)), ())
    assert comparison_line(trained(plan, many)).endswith(" (+100.0%); first (warm-up) step excluded")
    assert comparison_line(trained(plan, RunResult(many.steps[:1], ()))).endswith(" (+800.0%)")


def test_the_prediction_is_of_the_iteration_not_of_the_makespan() -> None:
    """What is measured has the sums of gradients, too; plans that say nothing of them have the makespan alone."""
    plan = chain_plan(2, 2)
    makespan, result = plan.predicted.makespan_ns, RunResult((FINE,), (1, 1))
    for said, told in ((makespan + 7, makespan + 7), (0, makespan)):
        other = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"iteration_ns": said})})
        assert trained(other, result).figures()["predicted_iteration_ns"] == told
        assert comparison_line(trained(other, result)).startswith(f"predicted {told}ns, ")


@pytest.mark.parametrize(("each_ns", "said"), [(2_000, True), (1_000, False)])
def test_texts_whose_tokens_are_off_say_why(each_ns: int, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of("gpt2-tiny", ["samples2"], [[0, 1]], batch=2, groups=1, context=13)
    assert plan.token_ns is not None
    text = WrittenText((5, 6, 7, 8, 9), tuple(round(plan.token_ns / 1_000) * each_ns * place for place in range(5)))
    options = DecodeOptions(model="gpt2-tiny", prompts=[[1]], new_tokens=5)
    outcome = DecodeOutcome(plan, options, RunResult((), (), requests=(text,)), others_cores=1.31)
    assert outcome.is_off is said
    _tell(outcome, "p.json", Outputs({}), None, as_json=False, local=True)
    first, times, *why = capsys.readouterr().out.splitlines()
    assert first == "5 6 7 8 9"
    assert times.startswith("token predicted")
    assert len(why) == said
    assert all(line.endswith("that processes take between them is not predicted") for line in why)
    assert all(f"(1.3 of {os.cpu_count()} cores during the run); " in line for line in why)
