"""Versions of files: earlier ones are read, keep their fingerprints, and are refused as clearly as today's.

What comes is tried with versions made up here, after those there are: profiles whose next version renames a key of
blocks and adds another, and a next version of every kind with one key more.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import create_model

from builders.chains import chain_plan, chain_profile
from pipeplan.cli.main import main
from pipeplan.costs import state_of
from pipeplan.errors import FileError
from pipeplan.files import (
    FORMATS,
    Block,
    File,
    Plan,
    Profile,
    Provenance,
    Recipe,
    base,
    parse,
    read_profile,
    schema,
    sha256_of,
    to_json,
    write_file,
)
from pipeplan.files import read_write as files
from pipeplan.files.base import (
    MIGRATIONS,
    Content,
    CurrentVersion,
    canonical_text,
    completed,
    current_version,
    form_of_version,
)
from pipeplan.files.profile import Parts
from pipeplan.texts import problems_of
from pipeplan.workload.elements import Items, Name
from pipeplan.workload.kinds import GRADIENTS, MASTER, OPTIMIZER, PARAMETERS
from support.marks import one_in

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
RECORDED: list[dict[str, Any]] = json.loads((TESTS / "golden" / "fingerprints_1.json").read_text(encoding="utf-8"))
"""Files of version 1 with the fingerprints they had before there were versions."""

READ = [row for row in RECORDED if not any(problems_of(row["file"]))]
"""Those whose texts may still be read: one of them has line breaks in its notes."""

VERSIONS = Path(base.__file__).parent / base.FOLDER
CLUSTERS = ROOT / "src/pipeplan/catalog/clusters"
SHIPPED = [*sorted((ROOT / "profiles").glob("*.json")), *sorted(CLUSTERS.glob("*.json"))]


LAST = {kind: current_version(kind) for kind in FORMATS}
"""The current version of every kind."""

NEXT = LAST["profile"] + 1
"""The version of profiles that is made up here."""


# Forms and fingerprints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["sha256"][:8])
def test_fingerprints_stay(row: dict[str, Any]) -> None:
    content = row["file"]
    if row in READ:
        assert sha256_of(parse(json.dumps(content), FORMATS[content["kind"]])) == row["sha256"]
    own = completed(content, form_of_version(content["kind"], 1))
    assert base.sha256_of_text(canonical_text(own)) == row["sha256"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_forms_give_the_text_that_models_write(path: Path) -> None:
    kind = json.loads(path.read_bytes())["kind"]
    read = parse(path.read_bytes(), FORMATS[kind])
    current = form_of_version(kind, LAST[kind])
    assert canonical_text(completed(json.loads(to_json(read)), current)) == read.model_dump_json()


@pytest.mark.parametrize("seed", range(5))
def test_the_fingerprint_is_of_the_meaning_at_the_own_version_too(seed: int) -> None:
    """Defaults left out, keys in another order: the same fingerprint, from the model and from the form."""
    rng, said = random.Random(seed), set()
    for row in RECORDED * 5:
        kind = row["file"]["kind"]
        content = rewritten(rng, row["file"], form_of_version(kind, 1))
        said.add(json.dumps(content))
        if row in READ:
            assert sha256_of(parse(json.dumps(content), FORMATS[kind])) == row["sha256"]
        own = completed(content, form_of_version(kind, 1))
        assert base.sha256_of_text(canonical_text(own)) == row["sha256"]
    assert len(said) > 25


def rewritten(rng: random.Random, content: Any, form: base.Form) -> Any:
    """The same meaning, said otherwise."""
    form = next((each for each in form.get("anyOf", [form]) if base._has_type(content, each)), form)
    if isinstance(content, list):
        return [rewritten(rng, each, form["items"]) for each in content] if "items" in form else content
    if not isinstance(content, dict) or "properties" not in form:
        return content
    keys = list(content)
    rng.shuffle(keys)
    properties = form["properties"]
    return {
        key: rewritten(rng, content[key], properties[key])
        for key in keys
        if "default" not in properties[key] or content[key] != properties[key]["default"] or rng.random() < 0.5
    }


def test_every_version_has_its_form() -> None:
    assert set(FORMATS) >= {kind for kind, _ in MIGRATIONS}
    expected = {f"{kind}.{version}.json" for kind in FORMATS for version in range(1, current_version(kind) + 1)}
    assert {path.name for path in VERSIONS.iterdir()} == expected


# The next version of profiles, made up --------------------------------------------------------------------------------


def _blocks_have_a_family(profile: Content) -> Content:
    blocks = []
    for block in profile["blocks"]:
        rest = {key: value for key, value in block.items() if key != "operator"}
        blocks.append(rest | {"family": block["operator"], "trainable": not block["shared"]})
    return profile | {"blocks": blocks}


_FIELDS: dict[str, Any] = {name: (field.annotation, field) for name, field in Block.model_fields.items()}
_FIELDS["family"] = _FIELDS.pop("operator")


class CostedParts(Parts):
    """What reads a profile asks of its blocks."""

    rows, meaning, prices = Block.rows, Block.meaning, Block.prices


Block2 = create_model("Block2", __base__=CostedParts, **_FIELDS, trainable=(bool, ...))


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, models: dict[str, type[File]]) -> None:
    """Let these be the formats, and keep their forms in a folder that has those of the versions there are."""
    if not (folder / "versions").exists():
        shutil.copytree(VERSIONS, folder / "versions")
    monkeypatch.setattr(base, "FOLDER", str(folder / "versions"))
    for kind, model in models.items():
        monkeypatch.setitem(FORMATS, kind, model)
        monkeypatch.setattr(files, kind.capitalize(), model)
    (folder / "schema").mkdir(exist_ok=True)
    assert schema.main([str(folder / "schema")]) == 0


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Profile]:
    """Profiles are at the next version."""
    monkeypatch.setitem(MIGRATIONS, ("profile", NEXT - 1), _blocks_have_a_family)

    class Profile2(Profile):
        schema_version: Annotated[int, CurrentVersion("profile")] = current_version("profile")
        blocks: Items[Block2]  # type: ignore[valid-type]  # made at run time by create_model

    use(monkeypatch, tmp_path, {"profile": Profile2})
    return Profile2


OLD = RECORDED[0]
"""A profile of version 1, and below the plan that was made from it then."""

AT_LAST = json.loads(to_json(parse(json.dumps(OLD["file"]), Profile)))
"""The same, written again in the current version."""


def old_plan() -> Plan:
    plan = chain_plan(2, 3, split=(12, 9), lag=7, weight_grad_bytes=1500)
    return plan.model_copy(update={"provenance": Provenance(profile="chain", profile_sha256=OLD["sha256"])})


def checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and text of ``pipeplan check``."""
    monkeypatch.setattr(sys, "argv", ["pipeplan", "check", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), "".join(capsys.readouterr())


def test_old_and_new_plans_are_accepted_with_their_profiles(
    second: type[Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, plans = tmp_path / "old.json", tmp_path / "new.json", [tmp_path / f"plan{n}.json" for n in range(3)]
    old.write_text(json.dumps(OLD["file"]), encoding="utf-8")
    profile = read_profile(str(old))
    write_file(profile, str(new))
    made_from = [OLD["sha256"], sha256_of(profile), sha256_of(read_profile(str(new)))]
    assert made_from[0] == made_from[1] != made_from[2]  # a plan made today from the old file has the old fingerprint
    for path, sha256 in zip(plans, made_from, strict=True):
        write_file(old_plan().model_copy(update={"provenance": Provenance(profile_sha256=sha256)}), str(path))

    accepted = {
        (number, named.name)
        for number, path in enumerate(plans)
        for named in (old, new)
        if checked(monkeypatch, capsys, str(path), "--profile", str(named))[0] == 0
    }
    assert accepted == {(0, "old.json"), (1, "old.json"), (2, "new.json")}

    content = copy.deepcopy(OLD["file"])
    content["blocks"][0]["operator"] = "another"
    old.write_text(json.dumps(content), encoding="utf-8")
    code, text = checked(monkeypatch, capsys, str(plans[0]), "--profile", str(old))
    assert code == 1
    assert "the plan was made from another" in text


def test_old_files_become_new_ones(second: type[Profile]) -> None:
    read = parse(json.dumps(OLD["file"]), second)
    assert [(block.family, block.trainable) for block in read.blocks] == [("block", True)] * 2  # type: ignore[attr-defined]  # fields of Block2
    text = to_json(read)
    assert json.loads(text)["schema_version"] == NEXT
    again = parse(text, second)
    assert to_json(again) == text
    assert sha256_of(again) != sha256_of(read) == OLD["sha256"]
    assert sha256_of(read.model_copy()) == OLD["sha256"]
    assert sha256_of(read.model_copy(update={"name": "chain"})) == sha256_of(again)  # no longer what was read


def test_sizes_of_an_old_file_beyond_all_floats_are_refused() -> None:
    content = copy.deepcopy(OLD["file"])
    for block in content["blocks"]:
        block |= {"parameter_bytes": 3, "optimizer_bytes": 10**400}
    with pytest.raises(FileError, match="bytes"):
        parse(json.dumps(content), Profile)


def test_reading_changes_no_content(second: type[Profile]) -> None:
    content = completed(RECORDED[2]["file"], form_of_version("profile", 1))
    for version in range(1, NEXT):
        before = copy.deepcopy(content)
        migrated = MIGRATIONS["profile", version](content) | {"schema_version": version + 1}
        assert content == before
        content = completed(migrated, form_of_version("profile", version + 1))


def test_a_third_version_builds_on_the_second(
    second: type[Profile], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each migration gets everything there is at its version: here what the one before it left out."""

    def blocks_are_named(profile: Content) -> Content:
        assert profile["schema_version"] == NEXT
        return profile | {"title": f"{profile['name']} of {len(profile['edges'])}"}

    monkeypatch.setitem(
        MIGRATIONS, ("profile", NEXT - 1), lambda content: {**_blocks_have_a_family(content), "edges": content["edges"]}
    )
    monkeypatch.setitem(MIGRATIONS, ("profile", NEXT), blocks_are_named)

    class Profile3(second):  # type: ignore[misc, valid-type]  # a class made at run time
        schema_version: Annotated[int, CurrentVersion("profile")] = current_version("profile")
        title: Name = "none"

    second_text = to_json(parse_at_second(second))
    use(monkeypatch, tmp_path, {"profile": Profile3})
    first, middle = parse(json.dumps(OLD["file"]), Profile3), parse(second_text, Profile3)
    assert first.title == middle.title == "chain of 1"
    assert sha256_of(first) == OLD["sha256"]
    assert len({sha256_of(first), sha256_of(middle), sha256_of(parse(to_json(first), Profile3))}) == 3


def parse_at_second(second: type[Profile]) -> Profile:
    """The recorded profile, made anew at the next version."""
    content = _blocks_have_a_family(AT_LAST)
    return second.model_validate_json(json.dumps(content | {"schema_version": NEXT}))


@pytest.fixture
def one_key_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every kind is at its next version, with a key that has a default."""
    models: dict[str, type[File]] = {}
    for kind, model in FORMATS.items():
        monkeypatch.setitem(MIGRATIONS, (kind, LAST[kind]), lambda content: content)
        version = (Annotated[int, CurrentVersion(kind)], current_version(kind))
        models[kind] = create_model(model.__name__, __base__=model, schema_version=version, added=(int, 7))  # type: ignore[call-overload]  # fields by name
    use(monkeypatch, tmp_path, models)


@pytest.mark.usefixtures("one_key_more")
@one_in(3, "path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_keep_their_fingerprints(path: Path) -> None:
    content = json.loads(path.read_bytes())
    kind = content["kind"]
    read = parse(path.read_bytes(), FORMATS[kind])
    assert read.added == 7  # type: ignore[attr-defined]  # a field made at run time
    own = completed(content, form_of_version(kind, content["schema_version"]))
    assert sha256_of(read) == base.sha256_of_text(canonical_text(own))


@pytest.mark.usefixtures("one_key_more")
@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["sha256"][:8])
def test_recorded_files_keep_their_fingerprints(row: dict[str, Any]) -> None:
    kind = row["file"]["kind"]
    read = parse(json.dumps(row["file"]), FORMATS[kind])
    assert (read.schema_version, read.added) == (LAST[kind] + 1, 7)  # type: ignore[attr-defined]  # a field made at run time
    assert sha256_of(read) == row["sha256"]


# What is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [NEXT, 0, -1, True, "1", 1.0, None, [1], 10**30])
def test_versions_that_are_not_known(given: object) -> None:
    with pytest.raises(FileError) as caught:
        parse(json.dumps(OLD["file"] | {"schema_version": given, "unknown": 1}), Profile, "x.json")
    newer = type(given) is int and given >= NEXT
    remedy = "read it with the newer pipeplan that wrote it" if newer else "say which version the file follows"
    known = "1" if NEXT == 2 else f"1 to {NEXT - 1}"
    assert str(caught.value) == (
        "x.json: not a valid profile file (docs/schema/profile.schema.json describes it):\n"
        f"  schema_version: Input should be {known}, got {given!r}; {remedy}"
    )


def test_versions_beyond_those_that_are_known(second: type[Profile]) -> None:
    text = f"schema_version: Input should be 1 to {NEXT}, got {NEXT + 1}; read it with the newer"
    with pytest.raises(FileError, match=text):
        parse(json.dumps(OLD["file"] | {"schema_version": NEXT + 1}), second)


def test_a_file_without_a_version_is_of_the_first(second: type[Profile]) -> None:
    content = {key: value for key, value in OLD["file"].items() if key != "schema_version"}
    assert sha256_of(parse(json.dumps(content), second)) == OLD["sha256"]
    content["blocks"] = parse_at_second(second).model_dump(mode="json")["blocks"]
    with pytest.raises(FileError) as caught:
        parse(json.dumps(content), second, "x.json")
    assert str(caught.value) == (
        "x.json: not a valid profile file of version 1, which one without schema_version is (docs/files.md, Versions):"
        "\n  blocks[0].operator: Field required"
    )
    schema_now = json.loads(schema.schema_files()["profile.schema.json"])
    assert schema_now["required"][0] == "schema_version"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"blocks": 1}, "blocks: Input should be a valid array, got 1"),
        ({"edges": [[]]}, "edges[0]: Input should be an object"),
        ({"nme": "x"}, "nme: Extra inputs are not permitted, got 'x'"),
        ({"kind": "recipe"}, "kind: Input should be 'profile', got 'recipe'"),
        ({"placement": {"schema_version": 2}}, "placement.schema_version: Input should be 1, got 2"),
        ({"name": ""}, "name: String should have at least 1 character, got ''"),
        ({"source": {"method": "guessed"}}, "source.method: String should match pattern"),
    ],
)
def test_old_files_are_refused_with_the_places_of_their_version(
    second: type[Profile], changes: Content, problem: str
) -> None:
    with pytest.raises(FileError) as caught:
        parse(json.dumps(OLD["file"] | changes), second, "x.json")
    assert str(caught.value).startswith("x.json: not a valid profile file of version 1 (docs/files.md, Versions):\n")
    assert caught.value.problems[0].startswith(problem)


def test_keys_of_a_later_version_are_refused(second: type[Profile]) -> None:
    content = copy.deepcopy(OLD["file"])
    content["blocks"][1]["family"] = "block"
    with pytest.raises(FileError, match=r"blocks\[1\].family: Extra inputs are not permitted, got 'block'"):
        parse(json.dumps(content), second)


STRANGE = [None, True, -1, 1.5, 10**400, "", "x", [], [[]], {}, {"a": 1}, [1, 2, 3]]


def test_damaged_old_files_end_well(second: type[Profile]) -> None:
    """Every value of a file in turn taken away, and made another: refused, or read and written again."""
    refused = 0
    for content in damages(RECORDED[2]["file"]):
        try:
            found = parse(json.dumps(content), second)
        except FileError as error:
            refused += len(error.problems) > 0
        else:
            assert to_json(parse(to_json(found), second)) == to_json(found)
    assert refused > 200


def damages(content: Content) -> Iterator[Content]:
    whole = copy.deepcopy(content)
    for container, key in list(_places(whole)):
        before, order = container[key], list(container) if isinstance(container, dict) else []
        for value in STRANGE:
            container[key] = value
            yield whole
        del container[key]
        yield whole
        if isinstance(container, list):
            container.insert(key, before)
        else:
            container[key] = before
            for each in order:
                container[each] = container.pop(each)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(content) if isinstance(content, dict) else range(len(content)):
        yield content, key
        if isinstance(content[key], dict | list):
            yield from _places(content[key])


# What is generated ---------------------------------------------------------------------------------------------


def test_a_form_is_fixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that changes without a new version is noticed, and nothing is written."""
    changed = create_model("Profile", __base__=Profile, added=(int, 7))
    before = sorted((ROOT / "docs" / "schema").iterdir())
    monkeypatch.setitem(FORMATS, "profile", changed)
    (tmp_path / "schema").mkdir()
    for arguments in ([], ["--check"]):
        assert schema.main([*arguments, str(tmp_path / "schema")]) == 1
        assert f"profile.{NEXT - 1}.json is fixed, and the model differs: add a migration" in capsys.readouterr().err
    assert list((tmp_path / "schema").iterdir()) == []
    assert sorted((ROOT / "docs" / "schema").iterdir()) == before


def test_a_new_version_gets_its_form_and_schema(second: type[Profile], tmp_path: Path) -> None:
    names = {path.name for path in (tmp_path / "versions").iterdir()}
    assert names == {path.name for path in VERSIONS.iterdir()} | {f"profile.{NEXT}.json"}
    assert schema.main(["--check", str(tmp_path / "schema")]) == 0
    assert schema.form_of(second.model_json_schema()) == form_of_version("profile", NEXT)


def test_chains_of_helpers_are_the_recorded_ones() -> None:
    """The plan of these tests is the recorded profile's, which says in other words that it is made up."""
    recorded = parse(json.dumps(OLD["file"]), Profile)
    profile = chain_profile(2, split=(12, 9), lag=7, weight_grad_bytes=1500)
    assert recorded.read_as("") == profile.model_copy(update={"source": recorded.source})


@pytest.mark.parametrize(
    ("dtype", "kept", "meant"),
    [
        ("float32", (40, 80), Recipe(name="fp32")),
        ("float32", (40, 40), Recipe(name="fp32", optimizer="momentum")),
        ("bfloat16", (20, 40), Recipe(name="bf16")),
        ("bfloat16", (20, 120), Recipe(name="bf16-mixed", gradient_dtype="bf16")),
        ("float16", (20, 120), Recipe(name="fp16-mixed")),
        ("", (20, 120), Recipe()),  # of two recipes
        ("float16", (20, 40), Recipe()),  # of none
        ("float32", (40, 120), Recipe()),
        ("float32", (42, 84), Recipe()),  # half a number
        ("float32", (40, 0), Recipe()),  # no optimizer, or one that is not stated
    ],
)
def test_bytes_of_version_1_keep_their_meaning(dtype: str, kept: tuple[int, int], meant: Recipe) -> None:
    """Named where they mean one recipe, and never other bytes than gradients as large as parameters."""
    row = {"microbatch_size": 1, "forward_ns": 1, "backward_ns": 2}
    sizes = dict(zip(("parameter_bytes", "optimizer_bytes"), kept, strict=True))
    blocks = [
        {"id": "a", "operator": "x", "costs": [row], **sizes, "tied": "words"},
        {"id": "b", "operator": "x", "costs": [row], **sizes, "tied": "words"},
        {"id": "c", "operator": "x", "costs": [row]},
    ]
    content = {"name": "p", "kind": "profile", "source": {"method": "measured", "dtype": dtype}, "blocks": blocks}
    profile = parse(json.dumps(content), Profile)
    assert profile.recipe == meant
    for block in profile.blocks[:2]:
        state = state_of(block, profile.recipe)
        assert (state[PARAMETERS], state[GRADIENTS], state[MASTER] + state[OPTIMIZER]) == (kept[0], *kept)
    assert state_of(profile.blocks[2], profile.recipe).total == 0
    assert profile.tied[0].blocks == ("a", "b")


def test_blocks_of_version_1_that_mean_several_recipes_keep_their_bytes() -> None:
    row = {"microbatch_size": 1, "forward_ns": 1, "backward_ns": 2}
    blocks = [
        {"id": f"b{n}", "operator": "x", "costs": [row], "parameter_bytes": 40, "optimizer_bytes": 40 * n}
        for n in range(3)
    ]
    content = {"name": "p", "source": {"method": "measured", "dtype": "float32"}, "blocks": blocks}
    profile = parse(json.dumps(content), Profile)
    assert profile.recipe.is_custom
    assert [block.optimizer_bytes for block in profile.blocks] == [0, 40, 80]


def test_a_number_of_an_old_plan_that_is_none_is_refused() -> None:
    """NaN is not even equal to itself."""
    plan = copy.deepcopy(next(row["file"] for row in READ if row["file"]["kind"] == "plan"))
    plan["operations"][0]["attributes"] = {"part": float("nan")}
    with pytest.raises(FileError) as caught:
        parse(json.dumps(plan), Plan, "old.json")
    assert any("attributes.part" in problem for problem in caught.value.problems)
