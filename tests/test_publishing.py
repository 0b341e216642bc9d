"""Versions, requirements and extras are the same everywhere that they are published."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import neula

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

CONDA = {"torch": "pytorch"}
"""Packages that have another name there."""


def oldest() -> dict[str, Version]:
    """The lower bound of each required package; all have one and no other."""
    requirements = [Requirement(need) for need in PROJECT["dependencies"]]
    return {need.name: Version(str(need.specifier).removeprefix(">=")) for need in requirements}


def read_yaml(path: str) -> Any:
    return pytest.importorskip("yaml").safe_load((ROOT / path).read_text("utf-8"))


def test_one_version() -> None:
    changes = re.findall(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert read_yaml("CITATION.cff")["version"] == neula.__version__ == changes[0]
    assert read_yaml("recipe/recipe.yaml")["context"]["version"] == neula.__version__


def test_the_changelog_keeps_its_form() -> None:
    headings = re.findall(r"^## .*$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    found = [
        re.fullmatch(r"## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d|Unreleased)", line) for line in headings
    ]
    assert all(found), headings
    versions = [Version(one[1]) for one in found if one]
    assert versions == sorted(set(versions), reverse=True)
    # Only what comes next is not released.
    assert [one[2] for one in found[1:] if one and one[2] == "Unreleased"] == []
    kinds = set(re.findall(r"^### (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_oldest_versions_are_those_that_are_tested() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text("utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {pin.name for pin in pins} == oldest().keys()
    for pin in pins:
        release = oldest()[pin.name].release
        assert str(pin.specifier) == f"=={'.'.join(map(str, (*release, 0)[:2]))}.*"


def test_the_recipe_requires_the_same() -> None:
    recipe = read_yaml("recipe/recipe.yaml")
    python, *packages = recipe["requirements"]["run"]
    assert python == "python"
    assert recipe["build"]["skip"] == 'match(python, "<" ~ python_min)'
    assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]
    built = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["build-system"]["requires"]
    assert recipe["requirements"]["host"] == [
        "python",
        "pip",
        *(need.replace(">", " >", 1) for need in built),
    ]
    assert packages == [f"{CONDA.get(name, name)} >={bound}" for name, bound in oldest().items()]
    assert recipe["build"]["python"]["entry_points"] == [
        f"{name} = {place}" for name, place in PROJECT["scripts"].items()
    ]
    assert recipe["about"]["summary"] == PROJECT["description"]


def test_links_of_the_readme_lead_to_the_repository_on_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("index_readme", ROOT / "tools" / "index_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = '[a](docs/a.md#b) [c](https://c.org) <img src="docs/d.svg"> <source srcset="docs/e.svg">'
    assert module.absolute(readme, "https://x.org/n/", "1.2.0") == (
        "[a](https://x.org/n/blob/v1.2.0/docs/a.md#b) [c](https://c.org) "
        '<img src="https://x.org/n/raw/v1.2.0/docs/d.svg"> '
        '<source srcset="https://x.org/n/raw/v1.2.0/docs/e.svg">'
    )
    monkeypatch.chdir(ROOT)
    made = module.dynamic_metadata("readme", {}, {"version": "1.2.0"})
    assert made["content-type"] == "text/markdown"
    assert ("](docs/" in made["text"]) == ("Repository" not in PROJECT.get("urls", {}))


def test_extras_exist_that_messages_name() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {
        extra
        for path in sources
        for names in re.findall(r"(?:neula|'\.)\[([a-z][a-z,]*)\]", path.read_text("utf-8"))
        for extra in names.split(",")
    }
    calls = re.compile(r"needs_extra\([^()]*\"(\w+)\"\)")
    named |= {extra for path in sources for extra in calls.findall(path.read_text("utf-8"))}
    assert {"plot", "io", "sklearn", "distributed"} <= PROJECT["optional-dependencies"].keys()
    assert named <= PROJECT["optional-dependencies"].keys()


def test_every_python_that_is_supported_is_named() -> None:
    pythons = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert f">={pythons[0]}" == PROJECT["requires-python"]
    page = (ROOT / "docs" / "versions.md").read_text("utf-8")
    assert f"| Python | {pythons[0]} | {pythons[-1]} |" in page
    for name, label in {"numpy": "NumPy", "scipy": "SciPy", "torch": "PyTorch"}.items():
        assert f"| {label} | {oldest()[name]} |" in page
