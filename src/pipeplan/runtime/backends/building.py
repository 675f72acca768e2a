"""What a builder is, a group of blocks as one module, and finding builders by their backends' modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from torch import Tensor, nn

from pipeplan.errors import UsageError

OURS = "pipeplan.kernels.backends."


@dataclass(frozen=True, slots=True)
class BuiltGroup:
    """A group as a backend runs it: ``call`` with the tensors that it takes, in ``around`` together with backward."""

    call: Callable[..., object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


class GroupModule(nn.Module):
    """Blocks that run one after the other as one module.

    It is called with what comes from outside, in the order of ``taken``, and gives what ``given`` names of its blocks'
    outputs: one tensor, or a tuple of several. ``calls`` are, for each block, where its arguments are: (-1, place among
    what is taken) or (number of a block, index of its output). ``whole``: they are the whole model, so that nothing of
    other backends runs right after them.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        calls: Sequence[Sequence[tuple[int, int]]],
        given: Sequence[tuple[int, int]],
        *,
        whole: bool = False,
    ) -> None:
        super().__init__()
        self.whole = whole
        self.blocks = nn.ModuleList(blocks)
        self._calls = tuple(tuple(each) for each in calls)
        self._given = tuple(given)

    def forward(self, *taken: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Tensors that the group takes to those that it gives."""
        made: list[tuple[Tensor, ...]] = []
        for block, places in zip(self.blocks, self._calls, strict=True):
            found = block(*(taken[index] if number < 0 else made[number][index] for number, index in places))
            made.append(found if isinstance(found, tuple) else (found,))
        results = tuple(made[number][index] for number, index in self._given)
        return results[0] if len(results) == 1 else results


@dataclass(frozen=True, slots=True)
class GroupBuilder:
    """What builds groups for one backend."""

    name: str
    module: ModuleType

    @classmethod
    def of(cls, name: str, rules: str) -> GroupBuilder:
        """That of a backend, whose rules are in a module: a user's own, or the one beside them here.

        Raises:
            UsageError: the module has no function ``build``.
        """
        own = f"{__name__.rpartition('.')[0]}.{rules.removeprefix(OURS)}" if rules.startswith(OURS) else rules
        module = import_module(own)
        if not callable(getattr(module, "build", None)):
            raise UsageError(f"--backend-rules {rules}: it has no function build(name, module, inputs, training)")
        return cls(name, module)

    def build(self, module: nn.Module, inputs: Sequence[Tensor], *, training: bool) -> BuiltGroup:
        """The group as the backend runs it, compiled for inputs such as these; whatever its library raises."""
        built = self.module.build(self.name, module, tuple(inputs), training)
        return built if isinstance(built, BuiltGroup) else BuiltGroup(built)

    @property
    def versions(self) -> Mapping[str, str]:
        """{library: version} of what builds and runs, beside torch."""
        found: Mapping[str, str] = getattr(self.module, "versions", dict)()
        return found

    @property
    def is_deterministic(self) -> bool:
        """Whether the same inputs give the same numbers, bit for bit."""
        return bool(getattr(self.module, "DETERMINISTIC", True))
