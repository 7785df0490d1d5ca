"""The shape of the tree: what packaging and house style promise, checked on the files themselves."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(p.parent for p in ROOT.glob("*/*/pyproject.toml"))
NAMESPACES = ("headrace", "headrace/coord", "headrace/coord/etcd", "headrace/coord/redis")


def tracked(pattern: str) -> list[Path]:
    """Files of the tree that git knows, or would know."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def test_namespaces_stay_namespaces() -> None:
    assert len(PACKAGES) == 14
    for package in PACKAGES:
        for namespace in NAMESPACES:
            init = package / "src" / namespace / "__init__.py"
            assert not init.exists(), f"{init.relative_to(ROOT)} would hide the other packages of that name"


def test_every_package_is_installed_typed_and_tested_by_make() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for package in PACKAGES:
        assert str(package.relative_to(ROOT)) in makefile
        if package.name != "api":
            assert f'"{package.relative_to(ROOT)}/src"' in (ROOT / "pyproject.toml").read_text()


def test_every_third_party_dependency_is_pinned_once() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
        if line and not line.startswith("#")
    )
    for package in PACKAGES:
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        wanted = list(project["dependencies"])
        for extra in project.get("optional-dependencies", {}).values():
            wanted += extra
        for requirement in wanted:
            name = re.split(r"[\[<>=~! ]", requirement, maxsplit=1)[0].lower()
            assert name.startswith("headrace-") or name in pins, f"{package.name} wants {name}, which has no pin"
    for line in (ROOT / "requirements-dev.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            assert line.lower() in pins, f"{line} has no pin"


@pytest.mark.parametrize(("kind", "most"), [("file", 500), ("function", 60)])
def test_files_and_functions_keep_the_houses_limits(kind: str, most: int) -> None:
    for path in tracked("*.py"):
        text = path.read_text()
        if "/src/" not in str(path):
            continue
        if kind == "file":
            assert len(text.splitlines()) <= most, path
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                # A typer command's signature is its help text, one option a line.
                if path.name != "main.py":
                    assert length <= most, f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines"


def test_public_modules_classes_and_functions_say_their_contract() -> None:
    missing = []
    for path in tracked("*.py"):
        if "/src/" not in str(path) or path.name == "__init__.py":
            continue
        tree = ast.parse(path.read_text())
        nodes: list[ast.AST] = [tree]
        nodes += [n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        for node in nodes:
            name = getattr(node, "name", path.stem)
            if not name.startswith("_") and path.name != "__main__.py" and not ast.get_docstring(node):  # type: ignore[arg-type]
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []


def test_nothing_waits_with_wait_for() -> None:
    """On Python 3.11 it swallows a cancel that comes together with the result (cpython #86296)."""
    for path in tracked("*.py"):
        if "/src/" in str(path):
            assert "asyncio.wait_for(" not in path.read_text(), f"{path}: use `async with asyncio.timeout(…)`"


def test_links_in_the_documentation_lead_somewhere() -> None:
    for path in tracked("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


def test_commands_named_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z]+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
