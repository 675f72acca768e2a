"""What a shell is offered at TAB: values of flags, names, files; and how quick the answer can be."""

import os
import subprocess
import sys

import click
import pytest
from click.shell_completion import ShellComplete

from pipeplan.catalog import names
from pipeplan.cli.main import VERBS, cli

RULES = {name for name in names("rules") if name.startswith("inter")}
PATHS = {"FILE", "PROFILE", "PLAN", "CLUSTER", "TRACE", "DIR", "DIRECTORY"}


def offered(*words: str) -> tuple[set[str], set[str]]:
    """Values, and kinds of what the shell itself completes, for a command line whose last word is incomplete."""
    *before, incomplete = words
    found = ShellComplete(cli, {}, "pipeplan", "_PIPEPLAN_COMPLETE").get_completions(before, incomplete)
    return {each.value for each in found if each.type == "plain"}, {each.type for each in found} - {"plain"}


@pytest.mark.parametrize(
    ("words", "values", "kinds"),
    [
        (("search", "p.json", "--scheduler", "1f"), {"1f1b", "1f1b+"}, set()),
        (("search", "p.json", "--scheduler", "rep"), {"repetend"}, set()),
        (("search", "p.json", "--placement", "bi"), {"bidirectional", "bidirectional-v-shape"}, {"file"}),
        (("compare", "p.json", "--placement", "one"), {"one-to-one"}, {"file"}),
        (("search", "p.json", "--rules", "inter"), RULES, {"file"}),
        (("run", "p.json", "--model", "gpt2-t"), {"gpt2-tiny", "gpt2-tiny-operators"}, {"file"}),
        (("profile", "dlrm"), {"dlrm", "dlrm-8", "dlrm-tiny"}, {"file"}),
        (("profile", "gpt2-tiny", "--device", "c"), {"cpu", "cuda"}, set()),
        (("frontier", "p.json", "--device", "h100-8"), {"h100-80gb"}, set()),
        (("example", "gpt2-124m", "--device", "v100"), {"v100-16gb", "v100-32gb"}, set()),
        (("example", "shape-m"), {"shape-m", "shape-mllm"}, set()),
        (("example", "testbed-g"), {"testbed-graphpipe"}, set()),
        (("export", "p.json", "--to", "v"), {"vllm"}, set()),
        (("search", "--split-backward", "y"), {"yes"}, set()),
        (("run", "p.json", "--optimizer", "ada"), {"adam", "adamw"}, set()),
        (("run", "p.json", "--checkpoint", "x"), set(), {"dir"}),
        (("frontier", "p.json", "--output-all", "x"), set(), {"dir"}),
    ],
)
def test_values_begin_as_typed(words: tuple[str, ...], values: set[str], kinds: set[str]) -> None:
    assert offered(*words) == (values, kinds)


@pytest.mark.parametrize("verb", VERBS)
def test_every_path_is_completed_by_the_shell(verb: str) -> None:
    context = click.Context(cli)
    command = cli.get_command(context, verb)
    assert command is not None
    found = 0
    for parameter in command.params:
        if PATHS & set((parameter.metavar or "").split("|")):
            found += 1
            kinds = {each.type for each in parameter.shell_complete(context, "x")}
            assert kinds & {"file", "dir"}, f"{verb}: {parameter.name}"
    assert found


def test_models_are_those_that_run() -> None:
    from pipeplan.catalog import configurations
    from pipeplan.runtime.models.networks import NETWORKS
    from pipeplan.runtime.models.zoo import ZOO

    assert offered("profile", "")[0] == {*ZOO, *NETWORKS, *configurations()}
    assert offered("profile", "llama3-7")[0] == {"llama3-70b"}


def test_a_shell_gets_its_answer_without_torch_and_solver() -> None:
    """As bash asks. Modules that take seconds to import stay out."""
    code = (
        "import sys\nfrom pipeplan.cli.main import main\nsys.argv = ['pipeplan']\ntry:\n    main()\nfinally:\n"
        "    print({'torch', 'ortools', 'transformers'} & {*sys.modules}, file=sys.stderr)\n"
    )
    asked = {
        "_PIPEPLAN_COMPLETE": "bash_complete",
        "COMP_WORDS": "pipeplan search p.json --scheduler zb",
        "COMP_CWORD": "4",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "plain,zb-h1" in done.stdout.splitlines()
    assert done.stderr.strip() == "set()"
