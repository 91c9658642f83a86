"""Measure how large and how readable the source is.

    python tools/code_figures.py                    print the figures of this checkout
    python tools/code_figures.py --compare FOLDER   beside those of another checkout, such as an older one
    python tools/code_figures.py --check            fail when a limit below is exceeded (`make check` runs this)

Everything is read from the syntax tree, except for complexity (radon) and the time of `voxlane --help`.
"""

from __future__ import annotations

import argparse
import ast
import collections
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from radon.complexity import cc_visit

FRAGMENT = re.compile(
    r"(?:\S+\s+\S+|\S+|(?:Of|In|By|As|At|For|With|Below|Its|Their|That|Those|So|And|Or|Where|Whose)\b.*)", re.DOTALL
)
"""Field docstrings that cannot be read alone: one or two words, or words that refer to something before them."""
VAGUE_NAMES = {
    *("asked", "found", "given", "here", "how", "kept", "known", "look", "made", "one", "ours", "rise", "room", "said"),
    *("seen", "shelf", "tally", "theirs", "there", "told", "trouble", "wanted", "was", "what", "where", "why"),
}
"""Names that say nothing about what they hold."""
MAX_LINES = 68_000
"""Lower this limit whenever the package shrinks."""
MAX_COMPLEXITY = 20


@dataclass
class Figures:
    """Figures of one checkout."""

    lines: int
    """Lines of Python in src/voxlane."""
    packages: int
    """Packages at the top level of src/voxlane."""
    benchmark_lines: int
    """Lines of Python in src/voxlane/bench and benchmarks."""
    shared_module_names: int
    """Module names that occur both in src/voxlane/bench and in benchmarks."""
    vague_names: int
    """Times that a name of VAGUE_NAMES is bound in src, tests, benchmarks, demo and tools."""
    repeated_classes: int
    """Class names defined more than once in src/voxlane."""
    repeated_private_functions: int
    """Private module-level function names defined in four or more modules of src/voxlane."""
    field_fragments: int
    """Field docstrings that cannot be read alone, by the pattern FRAGMENT."""
    argparse_lines: int
    """Lines of src/voxlane that use argparse's parsers."""
    too_complex: int
    """Functions of src/voxlane above MAX_COMPLEXITY by radon."""
    highest_complexity: int
    """The highest complexity of a function of src/voxlane by radon."""
    module_cycles: int
    """Groups of modules of src/voxlane that import each other, function-level imports included."""
    help_ms: float
    """Milliseconds of `voxlane --help`, median of 15."""


def source_files(root: Path, *folders: str) -> Iterator[Path]:
    """Yield the Python files below `folders`, in order."""
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


def count_lines(paths: Iterator[Path]) -> int:
    """Return the number of lines in all of `paths`."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every variable, parameter, function and class that `tree` binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def vague_bindings(root: Path) -> list[str]:
    """Return `file:line name` for every binding of a vague name."""
    results = []
    for path in source_files(root, "src", "tests", "benchmarks", "demo", "tools"):
        for line, name in bound_names(ast.parse(path.read_text(encoding="utf-8"))):
            if name.strip("_") in VAGUE_NAMES:
                results.append(f"{path.relative_to(root)}:{line} {name}")
    return results


def definitions(root: Path) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Count the modules that define each class name and each private function name."""
    classes: collections.Counter[str] = collections.Counter()
    functions: collections.Counter[str] = collections.Counter()
    for path in source_files(root, "src/voxlane"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        classes.update(node.name for node in body if isinstance(node, ast.ClassDef))
        functions.update({node.name for node in body if isinstance(node, ast.FunctionDef) and node.name[0] == "_"})
    return classes, functions


def fragment_docstrings(root: Path) -> list[str]:
    """Return `file:line text` for every field docstring that matches FRAGMENT."""
    results = []
    for path in source_files(root, "src/voxlane"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            for field, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    text = getattr(after.value, "value", None)
                    if isinstance(text, str) and FRAGMENT.fullmatch(text):
                        results.append(f"{path.relative_to(root)}:{after.lineno} {text!r}")
    return results


def complexities(root: Path) -> list[tuple[int, str]]:
    """Return radon's complexity of every function and method, highest first."""
    results = []
    for path in source_files(root, "src/voxlane"):
        for block in cc_visit(path.read_text(encoding="utf-8")):
            functions = [block, *getattr(block, "methods", [])]
            results += [
                (function.complexity, f"{path.relative_to(root)}:{function.lineno} {function.name}")
                for function in functions
                if type(function).__name__ == "Function"
            ]
    return sorted(set(results), reverse=True)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return which modules of src/voxlane each of them imports anywhere in its text, type-checking blocks excepted."""
    modules = {}
    for path in source_files(root, "src/voxlane"):
        parts = path.relative_to(root / "src").with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        typing_only = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if id(node) in typing_only:
                continue
            targets = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [
                    full if (full := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names
                ]
            graph[name].update(target for target in targets if target in modules and target != name)
    return graph


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected groups of two or more modules (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in graph[module]:
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                cycles.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for module in graph:
        if module not in index:
            visit(module)
    return cycles


def time_help(root: Path) -> float:
    """Return the median time of `voxlane --help` in milliseconds."""
    command = [sys.executable, "-m", "voxlane", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    times = []
    for _ in range(15):
        start = time.perf_counter()
        subprocess.run(command, env=environment, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def measure(root: Path, *, with_help: bool = True) -> Figures:
    """Return the figures of the checkout at `root`."""
    classes, functions = definitions(root)
    complexity = complexities(root)
    packages = [path for path in (root / "src/voxlane").iterdir() if (path / "__init__.py").exists()]
    bench = {path.stem for path in source_files(root, "src/voxlane/bench")} - {"__init__"}
    peers = {path.stem for path in source_files(root, "benchmarks")}
    argparse_use = re.compile(r"argparse|add_argument|add_parser|set_defaults|add_subparsers")
    return Figures(
        lines=count_lines(source_files(root, "src/voxlane")),
        packages=len(packages),
        benchmark_lines=count_lines(source_files(root, "src/voxlane/bench", "benchmarks")),
        shared_module_names=len(bench & peers),
        vague_names=len(vague_bindings(root)),
        repeated_classes=sum(count > 1 for name, count in classes.items() if not name.startswith("_")),
        repeated_private_functions=sum(count > 3 for count in functions.values()),
        field_fragments=len(fragment_docstrings(root)),
        argparse_lines=sum(
            bool(argparse_use.search(line))
            for path in source_files(root, "src/voxlane")
            for line in path.read_text(encoding="utf-8").splitlines()
        ),
        too_complex=sum(value > MAX_COMPLEXITY for value, _ in complexity),
        highest_complexity=complexity[0][0],
        module_cycles=len(find_cycles(import_graph(root))),
        help_ms=time_help(root) if with_help else float("nan"),
    )


def check(root: Path) -> list[str]:
    """Return what exceeds a limit."""
    problems = [f"vague name: {entry}" for entry in vague_bindings(root)]
    problems += [f"field docstring that cannot be read alone: {entry}" for entry in fragment_docstrings(root)]
    problems += [f"complexity {value}: {name}" for value, name in complexities(root) if value > MAX_COMPLEXITY]
    problems += [f"import cycle: {' '.join(group)}" for group in find_cycles(import_graph(root))]
    lines = count_lines(source_files(root, "src/voxlane"))
    if lines > MAX_LINES:
        problems.append(f"src/voxlane has {lines:,} lines, more than {MAX_LINES:,}")
    return problems


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="print the figures of this checkout as well")
    parser.add_argument("--check", action="store_true", help="fail when a limit is exceeded")
    options = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    if options.check:
        problems = check(root)
        print("\n".join(problems) or "names, docstrings, complexity, import cycles and size are within their limits")
        return 1 if problems else 0
    columns = [measure(folder) for folder in ([options.compare] if options.compare else []) + [root]]
    for field in fields(Figures):
        values = [getattr(column, field.name) for column in columns]
        print(f"{field.name:<28}" + "".join(f"{value:>12,.0f}" for value in values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
