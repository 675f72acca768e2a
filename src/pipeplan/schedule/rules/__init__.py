"""Schedules as rules (FlexPipe): a language, a file for it, and the scheduler that runs it."""

from pipeplan.schedule.rules.instructions import with_instruction, with_instructions
from pipeplan.schedule.rules.language import (
    Candidate,
    Check,
    DeviceRules,
    Instruction,
    Rules,
    StageTraversal,
    State,
    SubmoduleRules,
    TypeTraversal,
)

__all__ = [
    "Candidate",
    "Check",
    "DeviceRules",
    "Instruction",
    "Rules",
    "StageTraversal",
    "State",
    "SubmoduleRules",
    "TypeTraversal",
    "with_instruction",
    "with_instructions",
]
