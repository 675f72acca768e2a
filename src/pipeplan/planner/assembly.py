"""From the orders of a workload to its plan: programs, predicted figures, repetend."""

from __future__ import annotations

from fractions import Fraction

from pipeplan.lower import programs
from pipeplan.model import Plan, Predicted, Provenance, Repetend
from pipeplan.planner.numbers import number
from pipeplan.simulate.memory import peak_memory
from pipeplan.simulate.metrics import iteration_time, rates
from pipeplan.simulate.parts import parts_are_before, whole
from pipeplan.simulate.repetend import find_repetend, steady_bubble_rate
from pipeplan.simulate.timing import Orders, TaskGraph, earliest_starts, with_links

__all__ = ["assemble"]


def assemble(
    graph: TaskGraph,
    orders: Orders,
    bound_ns: int,
    period_bound_ns: Fraction,
    scheduler: str,
    *,
    split_overhead_ns: int = 0,
    provenance: Provenance | None = None,
) -> Plan:
    """The plan of a workload whose devices run ``orders``, with its predicted figures.

    ``bound_ns`` and ``period_bound_ns`` are what is proved about the workload.
    """
    workload = graph.workload
    orders = with_links(graph, orders)
    starts = earliest_starts(graph, orders)
    figures = rates(graph, orders, starts)
    repetend = _repetend(graph, orders)
    by_operation = {
        operation.id: tuple(starts[graph.offsets[index] : graph.offsets[index + 1]])
        for index, operation in enumerate(workload.operations)
    }
    return Plan(
        name=workload.name,
        placement=workload.placement,
        num_microbatches=workload.num_microbatches,
        microbatch_size=workload.microbatch_size,
        num_routes=workload.num_routes,
        devices=workload.devices,
        stages=workload.stages,
        operations=workload.operations,
        dependencies=workload.dependencies,
        starts_ns=by_operation,
        split_overhead_ns=split_overhead_ns,
        programs=programs(graph, orders, starts),
        repetend=repetend,
        predicted=Predicted(
            makespan_ns=figures.makespan_ns,
            lower_bound_ns=bound_ns,
            gap=figures.makespan_ns / bound_ns - 1,
            iteration_ns=iteration_time(workload, figures),
            period_ns=repetend.period_ns if repetend is not None else None,
            period_lower_bound_ns=number(period_bound_ns),
            bubble_rate=figures.bubble_rate,
            bubble_rate_span=figures.bubble_rate_span,
            bubble_rate_steady=steady_bubble_rate(workload, repetend) if repetend is not None else None,
            memory=peak_memory(graph, orders),
        ),
        provenance=(provenance or Provenance()).model_copy(update={"scheduler": scheduler}),
    )


def _repetend(graph: TaskGraph, orders: Orders) -> Repetend | None:
    """The repetend, where micro-batches are all alike behind those that run in parts."""
    replaced, whole_orders = whole(graph, orders)
    if not replaced.workload.is_uniform:
        return None
    found = find_repetend(replaced, whole_orders, earliest_starts(replaced, whole_orders))
    return found if found is not None and parts_are_before(graph, orders, found) else None
