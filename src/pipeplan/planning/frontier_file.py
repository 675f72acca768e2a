"""Reads back what ``frontier --json`` printed, so that its points can be shown again."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pipeplan.costs.throughput import Yardstick
from pipeplan.errors import FileError
from pipeplan.files.read_write import read_bytes
from pipeplan.planning.frontier import FrontierPoint, FrontierResult
from pipeplan.texts import escaped
from pipeplan.units import MAX_BYTES, MAX_NS, MAX_TOTAL
from pipeplan.workload.elements import MAX_DEVICES

_Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
_Ns = Annotated[int, Field(ge=0, le=MAX_NS)]


class _PrintedPoint(BaseModel):
    """A point, whose numbers are such that sums and quotients of them stay within what floats hold."""

    model_config = ConfigDict(extra="allow")

    num_devices: int = Field(ge=1, le=MAX_DEVICES)
    memory_bytes: _Bytes
    time_ns: _Ns
    workspace_bytes: _Bytes = 0
    price_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    bounds_ns: tuple[_Ns, _Ns | None] | None = None


class _Printed(BaseModel):
    """The keys that are needed; others may be there."""

    model_config = ConfigDict(extra="ignore")

    name: str
    of: str
    samples: int = Field(gt=0, le=MAX_TOTAL)
    exact: bool = False
    factor: float | None = None
    factor_without: tuple[str, ...] = ()
    profiled_only: bool = False
    chosen: int = Field(default=1, ge=1)
    points: list[_PrintedPoint] = Field(min_length=1)


def read_frontier(path: str) -> FrontierResult:
    """The points of a frontier, without their plans; ``-`` is stdin.

    Raises:
        FileError: the file cannot be read, or is not what ``frontier --json`` prints.
    """
    where = "<stdin>" if path == "-" else path
    try:
        printed = _Printed.model_validate_json(read_bytes(path))
        own = (point.model_dump(mode="json", exclude_unset=True) for point in printed.points)
        points = tuple(_POINT.validate_python(escaped(point)) for point in own)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise FileError(
            f"{where}: not what pipeplan frontier --plans --json prints: {place}: {first['msg']}; "
            "pipeplan frontier PROFILE --plans --json > FILE makes one"
        ) from None
    if printed.chosen > len(points):
        raise FileError(f"{where}: point {printed.chosen} is chosen, and there are {len(points)}")
    return FrontierResult(
        name=escaped(printed.name),
        mode="all",
        of=escaped(printed.of),
        samples=printed.samples,
        exact=printed.exact,
        seconds=0.0,
        points=tuple(dataclasses.replace(point, configurations={}) for point in points),
        plans=(),
        factor=printed.factor,
        factor_without=tuple(escaped(list(printed.factor_without))),
        profiled_only=printed.profiled_only,
        chosen=printed.chosen,
        makes_plans=False,
        yardstick=Yardstick("", "", None, None),
    )


_POINT: TypeAdapter[FrontierPoint] = TypeAdapter(FrontierPoint)
