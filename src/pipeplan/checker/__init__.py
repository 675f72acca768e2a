"""Is this plan right? Everything is recomputed from the plan's own numbers, by code that shares nothing with planners.

Here: the rules of a right plan, all listed in ``docs/check.md``. Not here: a solver, a schedule, a simulation or the
lowering; what these make passes through here. Time and memory are computed a second time, apart from workload.
"""

from __future__ import annotations

from fractions import Fraction

from pipeplan.checker.exchanges import check_exchanges
from pipeplan.checker.facts import RULES, Facts, Figures, Findings, Report, Violation, check_figures, figures_of
from pipeplan.checker.forwards import given_spans
from pipeplan.checker.inputs import check_cluster, check_places, check_profile
from pipeplan.checker.loop import check_loop
from pipeplan.checker.programs import Messages, check_messages, check_waits, read_programs
from pipeplan.checker.repetend import check_repetend
from pipeplan.checker.structure import check_structure
from pipeplan.checker.timeline import Links, check_inputs, check_links, check_memory, check_timeline
from pipeplan.checker.uplinks import uplink_factors
from pipeplan.costs.devices import other_device
from pipeplan.files import Cluster, Plan, Profile
from pipeplan.files.folded import in_place_0

__all__ = ["RULES", "Figures", "Report", "Violation", "check"]


def check(plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None) -> Report:
    """Check all rules of a plan; with the profile or the cluster it was made from, against these too.

    Rules that make no sense while others are broken are passed over: a plan is right only if ``problems`` is
    empty, but mending what it names may bring up more. Time is linear in the plan's size but for sorting; what a loop
    repeats adds nothing to it.
    """
    findings = Findings()
    facts = Facts.of(plan)
    check_structure(plan, findings)
    messages = None if findings.has("dependencies", "hops") else Messages.of(facts)
    programs = read_programs(facts, messages, findings)
    links: Links | None = None
    if messages is not None and not findings.has("actions", "transfers"):
        links = Links.of(facts, messages, programs)
        check_messages(facts, messages, programs, (links.on.values(), links.begins), findings)
        check_links(facts, links, findings)
    check_inputs(facts, findings)
    peaks: tuple[int, ...] = ()
    busy: list[int] = []
    sums: list[list[tuple[int, int]]] = []
    rate: Fraction | None = None
    if not findings.has("actions"):
        exchanges = check_exchanges(facts, programs, findings)
        check_timeline(facts, programs, links, exchanges.least, findings)
        if findings.has("transfer-order", "inputs", "order") and not findings.has("deadlock"):
            check_waits(facts, programs, findings)
        spans = given_spans(facts) if plan.is_inference else exchanges.spans
        peaks, busy, sums = check_memory(facts, programs, findings, spans), exchanges.busy, exchanges.sums
        if plan.repetend is not None and not findings.has("inputs", "links", "order", "exclusive"):
            rate = check_repetend(facts, programs, links, findings)
    timed = {problem.rule for problem in findings.problems} <= {"memory", "figures"}
    if plan.loop is not None and messages is not None and links is not None and timed:
        check_loop(facts, messages, programs, links, findings)
    figures = figures_of(facts, rate, peaks, busy, sums)
    check_figures(facts, figures, findings)
    is_large = cluster is None or cluster.num_devices >= plan.num_devices  # or nothing of it is where the plan says
    if profile is not None and is_large:
        check_profile(in_place_0(plan), profile, cluster, findings, uplink_factors(plan, cluster))
    if cluster is not None:
        if is_large:
            check_places(plan, cluster, findings)
        check_cluster(in_place_0(plan), cluster, figures.peak_memory_bytes, findings)
    remark = None
    if cluster is not None:
        device = plan.provenance.device if profile is None else profile.source.device
        remark = other_device(device, cluster, plan.num_devices)
    remarks = () if remark is None else (remark,)
    return Report(tuple(findings.problems), sum(findings.counts.values()), figures, remarks)
