"""Holds the import table: who may import whom. Add to the table before adding an import.

Every file's syntax tree is walked, function bodies included.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "forespeak"

# A folder or file of the package -> what it may import of the package, itself apart. A dotted name
# allows that one module, a plain one everything below it.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "sampling": {"errors"},
    "types": {"errors", "sampling"},
    "kernels": set(),
    "spec": {"errors", "types", "sampling", "kernels"},
    "formats": {"errors", "types", "models.config"},
    "models": {"errors", "types", "formats", "kernels"},
    "drafters": {"errors", "types", "formats", "models"},
    "engine": {
        *("errors", "types", "sampling", "spec", "models"),
        # The table is names and numbers; the classes come through the loader alone.
        *("drafters.base", "drafters.loader", "drafters.naming", "drafters.shipped"),
        "drafters.table",
    },
    "train": {"errors", "types", "sampling", "formats", "models", "drafters", "bench.prompts"},
    "serving": {"errors", "types", "spec", "engine"},
    "bench": {"errors", "types", "sampling"},
    "deploy": {"errors", "types"},
    "cli": {
        *("errors", "types", "sampling", "spec", "formats", "models", "drafters", "engine"),
        *("train", "serving", "bench", "deploy"),
    },
    # The public names; all but the errors and types are loaded when first used.
    "__init__": {"errors", "types", "engine.llm"},
    "__main__": {"cli"},
}

# Only making data decodes: it wants the batch that users get. Training itself must not lean on the
# engine, so that the two can be changed apart. Files of train that begin so may import it.
MAKES_DATA = "generate"

# What `forespeak --help` must not wait for: outside function bodies the command line imports none
# of these, and of the package nothing that imports them.
HEAVY = {"torch", "numpy", "numba", "transformers", "huggingface_hub", "scipy", "safetensors"}
TORCH_FREE_FOLDERS = {"cli", "bench", "deploy"}
LAZY_FOR_CLI = {"engine", "models", "spec", "formats", "train", "serving"}
TORCH_FREE_MODULES = (
    "forespeak",
    "forespeak.errors",
    "forespeak.types",
    "forespeak.sampling",
    "forespeak.drafters.table",
    "forespeak.bench.compare",
    "forespeak.bench.prompts",
    "forespeak.bench.report",
    "forespeak.cli.app",
    "forespeak.models.sources",
)

FILES = sorted(SOURCE.rglob("*.py"))


def folder_of(file: Path) -> str:
    relative = file.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Every module that is imported anywhere below a node, by its full name, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package[: len(package) - node.level + 1]
                base = ".".join((*above, base) if base else above)
            for alias in node.names:
                # `from forespeak.models import sources` may name a module or something in one.
                yield f"{base}.{alias.name}", node.lineno


def ours(name: str) -> str | None:
    """A module's name below the package, None for other people's. The package itself is ""."""
    if name == "forespeak":
        return ""
    return name.removeprefix("forespeak.") if name.startswith("forespeak.") else None


def allows(allowed: set[str], inner: str) -> bool:
    return any(inner == entry or inner.startswith(f"{entry}.") for entry in allowed)


def package_of(file: Path) -> tuple[str, ...]:
    return ("forespeak", *file.relative_to(SOURCE).parent.parts)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_import_table(file: Path):
    folder = folder_of(file)
    assert folder in ALLOWED, f"{folder} is not in the import table; add it with its reasons"
    allowed = ALLOWED[folder]
    if folder == "train" and file.name.startswith(MAKES_DATA):
        allowed = allowed | {"engine"}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for name, line in imports(tree, package_of(file)):
        inner = ours(name)
        if inner is None or inner.split(".")[0] == folder:
            continue
        if folder == "cli" and inner in ("", "__version__"):
            continue
        assert allows(allowed, inner), f"{file}:{line}: {folder} may not import {name}"


def module_level(tree: ast.Module) -> ast.Module:
    """The tree without function bodies and without what only type checkers read."""

    class Pruned(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                return None
            return self.generic_visit(node)

    pruned = Pruned().visit(tree)
    assert isinstance(pruned, ast.Module)
    return pruned


LIGHT = [file for file in FILES if folder_of(file) in TORCH_FREE_FOLDERS]


@pytest.mark.parametrize("file", LIGHT, ids=lambda file: str(file.relative_to(SOURCE)))
def test_light_folders_import_heavy_ones_inside_functions_only(file: Path):
    tree = module_level(ast.parse(file.read_text(encoding="utf-8")))
    for name, line in imports(tree, package_of(file)):
        inner = ours(name)
        heavy = (inner or "").split(".")[0] in LAZY_FOR_CLI or name.split(".")[0] in HEAVY
        assert not heavy, f"{file}:{line}: import {name} inside the function that needs it"


@pytest.mark.parametrize("module", TORCH_FREE_MODULES)
def test_torch_free(module: str):
    heavy = sorted(HEAVY)
    program = (
        f"import sys, {module}; print(*[name for name in {heavy!r} if name in sys.modules], end='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_files_stay_readable(file: Path):
    num_lines = len(file.read_text(encoding="utf-8").splitlines())
    assert num_lines <= 400, f"{file} has {num_lines} lines; split it by meaning"
    assert file.stem not in ("utils", "util", "helpers", "misc", "common"), (
        f"{file}: name it after what it does"
    )


def test_the_table_has_no_cycle():
    """Folder by folder: what a folder imports never leads back to it."""
    # formats reads the one file of plain sizes in models, which imports nothing of ours.
    edges = {
        folder: {entry.split(".")[0] for entry in allowed if entry != "models.config"}
        for folder, allowed in ALLOWED.items()
    }

    def reached(folder: str, seen: set[str]) -> set[str]:
        for entry in edges[folder] - seen:
            seen |= {entry} | reached(entry, seen | {entry})
        return seen

    for folder in edges:
        assert folder not in reached(folder, set()), folder


def test_models_config_imports_nothing_of_ours():
    tree = ast.parse((SOURCE / "models" / "config.py").read_text(encoding="utf-8"))
    inner = {ours(name) for name, _ in imports(tree, ("forespeak", "models"))} - {None}
    assert all(name is not None and name.split(".")[0] == "errors" for name in inner), inner
