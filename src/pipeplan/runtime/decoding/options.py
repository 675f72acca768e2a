"""How text is generated, and what came of it."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.files.read_write import read_text
from pipeplan.runtime.launch.job import RunOptions
from pipeplan.runtime.models.given_names import Name, PythonValue, require_model
from pipeplan.runtime.training.options import RunOutcome, format_of, grain_of
from pipeplan.runtime.training.weight_files import files_of
from pipeplan.texts import counted, of_json
from pipeplan.units import format_ns

_MOST_AT_ONCE = 256
"""Words of a prompt that enter at once, where the plan says nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions(RunOptions):
    """How to generate text. ``model``, ``sequence``, ``grain``, ``seed``, ``dtype`` and ``init`` are as in training.

    ``prompts`` are token ids; each is continued by ``new_tokens``, or until one of ``stop``. ``temperature`` 0 takes
    the most likely token; else tokens are sampled by their probabilities, from the ``top`` most likely ones if that is
    given.
    """

    model: Name
    prompts: Sequence[Sequence[int]] = ()
    new_tokens: int = 16
    temperature: float = 0.0
    top: int | None = None
    stop: Sequence[int] = ()
    sequence: int | None = None
    grain: Literal["layer", "half", "operator"] | None = None
    seed: int = 0
    dtype: str | None = None
    init: str | None = None

    job: ClassVar[str] = "pipeplan.runtime.decoding.decode:decode_job"

    def require_consistent(self) -> None:
        """Refuse what makes no sense together. Raises UsageError."""
        if not self.prompts:
            raise UsageError(
                "--prompt-file: it has no prompts; give one per line, as a JSON list of token ids or as text"
            )
        for number, prompt in enumerate(self.prompts, 1):
            if not prompt:
                raise UsageError(f"--prompt-file: prompt {number} is empty; a prompt has at least one token")
        if self.device != "cpu":
            raise UsageError("--prompt-file: text is generated on CPUs only so far; leave --device out")
        if self.trace or self.blocking:
            raise UsageError("--prompt-file: decode steps have no --trace and no --blocking; leave them out")
        if isinstance(self.model, str):
            require_model(self.model)
        if self.init is not None:
            files_of(self.init)
        if self.top is not None and not self.temperature:
            raise UsageError(
                f"--top-k {self.top} is for sampling, and without --temperature nothing is sampled; give both"
            )

    @property
    def has_objects(self) -> bool:
        """Whether the model is what Python has given."""
        return isinstance(self.model, PythonValue)

    def by_plan(self, plan: Plan) -> Self:
        """The same, with what the plan says where they leave it open.

        Raises:
            UsageError: it is no decoding plan, or its caches were not counted for texts of this length.
        """
        if plan.decode is None:
            raise UsageError(
                f"plan {plan.name!r} has no decode steps, which --prompt-file needs; make one from what profile MODEL "
                "--inference --context TOKENS writes, by search --kv auto"
            )
        planned = plan.decode.context_tokens
        if self.longest > planned:
            raise UsageError(
                f"--new-tokens {self.new_tokens}: with the longest prompt, of {max(map(len, self.prompts))} tokens, a "
                f"text has {self.longest}, and the plan's caches hold {planned}; give fewer, or search with "
                f"--context {self.longest}"
            )
        return replace(self, dtype=self.dtype or format_of(plan), grain=self.grain or grain_of(plan, self.model))

    @property
    def longest(self) -> int:
        """The most words of a text in the end."""
        return max(map(len, self.prompts)) + self.new_tokens

    def chunk(self, planned: int, window: int | None) -> int:
        """Words of a prompt that enter at once: as planned, or all of one, but no more than words look back."""
        most = planned or min(_MOST_AT_ONCE, max(map(len, self.prompts)))
        return most if window is None else min(most, window)


def read_prompts(
    source: str | Sequence[Sequence[int] | str], tokenizer: str | None
) -> tuple[list[list[int]], tuple[int, ...]]:
    """The token ids of prompts, and the token that ends a text, if a tokenizer has one.

    Args:
        source: path of a file with one prompt per line, each a JSON list of token ids, or with a tokenizer any text;
            or the prompts themselves.
        tokenizer: folder of a Hugging Face tokenizer, or None.

    Raises:
        FileError: the file cannot be read.
        UsageError: a prompt is neither, or the folder has no tokenizer.
    """
    lines = _lines(source) if isinstance(source, str) else source
    where = f"--prompt-file {source}, line" if isinstance(source, str) else "--prompt-file: prompt"
    encode = None if tokenizer is None else tokenizer_of(tokenizer)
    found = [
        _prompt(f"{where} {number}", line, encode)
        for number, line in enumerate(lines, 1)
        if not isinstance(line, str) or line.strip()
    ]
    stop = None if encode is None else encode.eos_token_id
    return found, (stop,) if isinstance(stop, int) else ()


def tokenizer_of(folder: str) -> Any:
    """The tokenizer in a folder; nothing is downloaded. Raises UsageError."""
    if not os.path.isdir(folder):
        raise UsageError(f"--tokenizer {folder}: there is no such folder; give that of a Hugging Face tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError(f"--tokenizer needs transformers: pip install '.[huggingface]' ({error})") from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers makes of a folder without one
        raise UsageError(f"--tokenizer {folder}: transformers reads no tokenizer there: {error}") from error


def _lines(path: str) -> list[str]:
    return read_text(path).split("\n")  # and not where else Unicode has lines end, which texts may have inside


def _prompt(where: str, line: Sequence[int] | str, encode: Any) -> list[int]:
    ids: Any = None if isinstance(line, str) else [*line]
    if isinstance(line, str):
        with contextlib.suppress(ValueError):
            ids = of_json(line)
    if isinstance(ids, list) and all(type(each) is int for each in ids):
        return ids
    if encode is None or not isinstance(line, str):
        raise UsageError(
            f"{where}: {line[:40]!r} is no JSON list of token ids such as [15, 3, 7]; text needs --tokenizer DIR"
        )
    made: list[int] = encode.encode(line)
    return made


_WARM_UP = 3
"""Tokens of a text that do not count: its prompt, and steps that warm up."""


@dataclass(frozen=True, slots=True, repr=False)
class DecodeOutcome(RunOutcome):
    """The generated texts, and how long a token took, beside the plan's."""

    def __repr__(self) -> str:
        times = f"token {format_ns(self.warm_ns)}, predicted {format_ns(self.predicted_ns)}"
        return f"<DecodeOutcome {self.plan.name!r}: {counted(len(self.result.requests), 'text')}, {times}>"

    def lines(self) -> Iterator[str]:
        """What is shown of it: the times, and how many tokens each text has got."""
        yield repr(self)[1:-1]
        yield from (f"{counted(len(each.ids), 'token')}: {list(each.ids[:12])}" for each in self.result.requests[:20])

    @property
    def predicted_ns(self) -> int:
        """From a request's token to its next one, as predicted."""
        return round(self.plan.token_ns or 0)

    @property
    def warm_ns(self) -> int:
        """The same as it was: the median over all texts, without their first tokens. 0 where none has more."""
        gaps = [
            end - begin
            for request in self.result.requests
            for begin, end in pairwise(request.times_ns[min(_WARM_UP, max(0, len(request.times_ns) - 2)) :])
        ]
        return round(statistics.median(gaps or [0]))

    @property
    def is_off(self) -> bool:
        """Whether a token took clearly another time than predicted."""
        return self._differs(self.warm_ns, self.predicted_ns) if self.warm_ns else False

    def figures(self) -> dict[str, object]:
        """The object of ``run --json``."""
        options, result = self.options, self.result
        assert isinstance(options, DecodeOptions)
        assert self.plan.decode is not None
        last = max((request.times_ns[-1] for request in result.requests if request.times_ns), default=0)
        count = sum(len(request.ids) for request in result.requests)
        return {
            "plan": self.plan.name,
            "model": str(options.model),
            "num_ranks": len(self.plan.devices),
            "device": options.device,
            "dtype": options.dtype,
            "backend": options.transport,
            "kv": self.plan.decode.kv,
            "token_ns": self.warm_ns,
            "predicted_token_ns": self.predicted_ns,
            "tokens_per_s": count * 1e9 / last if last else None,
            "requests": [{"ids": list(each.ids), "times_ns": list(each.times_ns)} for each in result.requests],
            "sent_bytes": [dict(each) for each in result.sent_bytes],
            "wire_bytes": list(result.wire_bytes),
            "cache_bytes": list(result.cache_bytes),
            "predicted_cache_bytes": list(self.plan.cache_bytes),
            "versions": dict(result.versions),
        }
