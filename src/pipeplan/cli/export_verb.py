"""``pipeplan export``: a plan in the words of another tool."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from pipeplan import _api
from pipeplan.cli.output import Outputs, say, say_notes
from pipeplan.cli.shared import FILE, TARGET
from pipeplan.errors import FileError, UsageError

if TYPE_CHECKING:
    from pipeplan._api import Export


@click.command("export")
@click.argument("plan_path", type=FILE, metavar="PLAN")
@click.option(
    "--to",
    required=True,
    type=TARGET,
    metavar="TARGET",
    help="Target tool: torch (a schedule's CSV; with -o also FILE.modules.json), torchtitan or automodel (a "
    "folder with a recipe and its schedule), megatron (layout string, then arguments), deepspeed (a PipelineModule), "
    "galvatron (its JSON), vllm, sglang or tensorrt-llm (layers per stage), huggingface (device_map), chakra (a folder "
    "with an execution trace of each rank, for ASTRA-sim).",
)
@click.option(
    "--names",
    metavar="LIST",
    help="For targets that take module names: the model's, separated by commas, N for a layer's number.  [default: "
    "the plan's; without, tok_embeddings,layers.N,norm,lm_head for torch and torchtitan, else "
    "model.embed_tokens,model.layers.N,model.norm,lm_head]",
)
@click.option(
    "--base", metavar="pkg.mod:function", help="For torchtitan: your own recipe, on which the plan's is based."
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    default="-",
    metavar="PATH",
    help="Where to write: a file (- for stdout), or for targets with several files a folder, which is created.",
)
def export_command(plan_path: str, to: str, names: str | None, base: str | None, output: str) -> None:
    """Write PLAN for another tool, which then runs the plan's stages.

    A plan that the tool cannot run is refused, with the place in the plan. Remarks on what the tool does differently go
    to stderr, so stdout has only what the tool reads. PLAN may be - for stdin.
    """
    found = _api.export(_api.read_plan(plan_path), to, template_of(names), base)
    files = _files_of(found, output)
    with Outputs({f"-o ({path})" if number else "-o": path for number, path in enumerate(files)}) as outputs:
        say_notes(found.notes)
        for path, text in files.items():
            outputs.write_text(text, path)
            if len(files) <= MOST_NAMED:
                outputs.say_written(f"plan for {to}", path)
        if len(files) > MOST_NAMED:
            say(f"plan for {to} written to {output}: {len(files)} files", err=True)


MOST_NAMED = 4
"""Files that are named one by one when they are written; of more it is said how many there are."""


def _files_of(found: Export, output: str) -> dict[str, str | bytes]:
    """{path: what goes there}, in a folder where there are several. Raises UsageError without one."""
    if not found.files:
        beside = {} if output == "-" else found.beside
        return {output: found.text, **{f"{output}{ending}": text for ending, text in beside.items()}}
    names = " and ".join(found.files) if len(found.files) <= MOST_NAMED else f"{len(found.files)} files"
    if output == "-":
        raise UsageError(f"--to {found.target} writes {names}; give -o FOLDER")
    if os.path.exists(output) and not os.path.isdir(output):
        raise UsageError(f"-o {output} is a file, and --to {found.target} writes {names} into a folder; name another")
    try:
        os.makedirs(output, exist_ok=True)
    except OSError as error:
        raise FileError(f"{output}: cannot be made: {error.strerror or error}; choose a folder with -o") from error
    return {os.path.join(output, name): text for name, text in found.files.items()}


def template_of(names: str | None) -> tuple[str, ...]:
    """The modules that a text names."""
    return () if names is None else tuple(name.strip() for name in names.split(","))
