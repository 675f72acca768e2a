"""Schedules as rules (FlexPipe): a language, a file for it, and the scheduler that runs it.

Here: how rules are read and run. Not here: the rules files that ship (catalog), where rules place a model (planning).
"""

from pipeplan.schedule.rules.custom_ops import with_instruction, with_instructions
from pipeplan.schedule.rules.engine import schedule_by_rules
from pipeplan.schedule.rules.language import (
    Check,
    CustomOp,
    DeviceRules,
    ReadyAction,
    Rules,
    StageTraversal,
    State,
    SubmoduleRules,
    TypeTraversal,
    read_rules,
)
from pipeplan.schedule.rules.sweep import built_in_rules, sweep

__all__ = [
    "Check",
    "CustomOp",
    "DeviceRules",
    "ReadyAction",
    "Rules",
    "StageTraversal",
    "State",
    "SubmoduleRules",
    "TypeTraversal",
    "built_in_rules",
    "read_rules",
    "schedule_by_rules",
    "sweep",
    "with_instruction",
    "with_instructions",
]
