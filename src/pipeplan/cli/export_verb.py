"""``pipeplan export``: a plan in the words of another tool."""

from __future__ import annotations

import sys

import click

from pipeplan import _api
from pipeplan.cli.output import Outputs, say_notes
from pipeplan.cli.shared import FILE, TARGET


@click.command("export")
@click.argument("plan_path", type=FILE, metavar="PLAN")
@click.option(
    "--to",
    required=True,
    type=TARGET,
    metavar="TARGET",
    help="Who is to read it: torch (a schedule's CSV; with -o also FILE.modules.json), megatron (layout string, then "
    "arguments), vllm, sglang or tensorrt-llm (layers per stage), huggingface (device_map).",
)
@click.option(
    "--names",
    metavar="LIST",
    help="For torch and huggingface: the model's modules with commas, N for a layer's number.  "
    "[default: tok_embeddings,layers.N,norm,lm_head, or model.embed_tokens,model.layers.N,model.norm,lm_head]",
)
@click.option("-o", "--output", type=FILE, default="-", metavar="FILE", help="Where to write; - for stdout.")
def export_command(plan_path: str, to: str, names: str | None, output: str) -> None:
    """Write PLAN for another tool, which then runs the plan's stages.

    What the tool cannot run is refused, with its place in the plan. What it does its own way is said on stderr, so that
    stdout has only what the tool reads. PLAN may be - for stdin.
    """
    found = _api.export(_api.read_plan(plan_path), to, template_of(names))
    beside = {} if output == "-" else {f"{output}{ending}": text for ending, text in found.beside.items()}
    with Outputs({"-o": output, **{f"-o ({path})": path for path in beside}}) as outputs:
        say_notes(found.notes)
        if output == "-":
            sys.stdout.write(found.text)
        for path, text in {} if output == "-" else {output: found.text, **beside}.items():
            outputs.write_text(text, path)
            outputs.say_written(f"plan for {to}", path)


def template_of(names: str | None) -> tuple[str, ...]:
    """The modules that a text names."""
    return () if names is None else tuple(name.strip() for name in names.split(","))
