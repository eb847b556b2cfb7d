"""Counts what keeps the house in order, and says what is above its limit (part of `make arch`).

Import circles count those under TYPE_CHECKING and inside functions, too. Attributes are what a
class assigns to `self`. Constructors count where somebody wrote an `__init__`.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
#: Packages whose classes and imports count, generated code aside.
PACKAGES = ("serve", "loadgen", "gnnserve")
GENERATED = "serve/pb/"
#: Highest values by name of a count.
LIMITS = {
    "largest file": 600,
    "largest class": 300,
    "most attributes": 29,
    "most constructor arguments": 9,
    "import circles": 0,
    "class names used twice": 0,
}


@dataclass(frozen=True)
class Count:
    """One count, and what it counts: the largest, or all where there should be none."""

    name: str
    value: float
    of: tuple[str, ...] = field(default=())

    @property
    def passes_limit(self) -> bool:
        """True when it is above its limit."""
        return self.value > LIMITS.get(self.name, float("inf"))

    def __str__(self) -> str:
        """Return the line that is printed."""
        limit = f" (limit {LIMITS[self.name]})" if self.name in LIMITS else ""
        told = f"  {', '.join(self.of)}" if self.of else ""
        return f"{self.value:>8,g}  {self.name}{limit}{told}"


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the checkout that git tracks, generated ones aside."""
    said = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, check=True, capture_output=True
    ).stdout.decode()
    paths = [name for name in said.split("\0") if name and not name.startswith(GENERATED)]
    return [ROOT / name for name in paths if (ROOT / name).exists()]


def lines(paths: Iterable[Path]) -> int:
    """Return the lines of all files."""
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def largest(name: str, sizes: Iterable[tuple[int, str]]) -> Count:
    """Return the count of the largest, with all that are above the limit."""
    found = sorted(sizes, reverse=True)
    above = [what for size, what in found if size > LIMITS.get(name, float("inf"))]
    return Count(name, found[0][0], tuple(above) or (found[0][1],))


def classes(paths: Iterable[Path]) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield every class with the place where it is."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(ROOT)}:{node.name}", node


def height(node: ast.ClassDef) -> int:
    """Return the lines of a class."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def attributes(node: ast.ClassDef) -> int:
    """Return how many attributes a class assigns to `self`."""
    return len({
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    })  # fmt: skip


def arguments(node: ast.ClassDef) -> int:
    """Return how many arguments the constructor takes besides `self`."""
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            taken = inner.args
            return len(taken.posonlyargs + taken.args + taken.kwonlyargs) - 1
    return 0


def circles() -> list[str]:
    """Return the groups of modules that import one another."""
    import grimp
    import networkx

    sys.path.insert(0, str(ROOT))
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    edges = [
        (one, other)
        for one in graph.modules
        for other in graph.find_modules_directly_imported_by(one)
    ]
    found = networkx.strongly_connected_components(networkx.DiGraph(edges))
    return [" + ".join(sorted(group)) for group in found if len(group) > 1]


def counts() -> Iterator[Count]:
    """Yield all counts."""
    sources = tracked(*(f"{package}/*.py" for package in PACKAGES))
    sizes = [(lines([path]), str(path.relative_to(ROOT))) for path in sources]
    found = list(classes(sources))
    names = Counter(node.name for _, node in found if not node.name.startswith("_"))
    doubled = [where for where, node in found if names[node.name] > 1]
    circle = circles()
    spelled = [
        str(path.relative_to(ROOT))
        for path in sources
        if re.search(r"['\"]edge_attr['\"]", path.read_text(encoding="utf-8"))
    ]
    yield Count("files", len(sources))
    yield Count("lines of the median file", median(size for size, _ in sizes))
    yield largest("largest file", sizes)
    yield largest("largest class", ((height(node), where) for where, node in found))
    yield largest("most attributes", ((attributes(node), where) for where, node in found))
    yield largest("most constructor arguments", ((arguments(node), where) for where, node in found))
    yield Count("import circles", len(circle), tuple(circle))
    yield Count("class names used twice", len(doubled), tuple(doubled))
    yield Count('files that spell "edge_attr"', len(spelled), tuple(spelled))
    for name in ("serve", "loadgen", "bench", "docs", "tests"):
        yield Count(f"lines of Python in {name}", lines(tracked(f"{name}/*.py")))
    yield Count("lines of C++ and CUDA in csrc", lines(tracked("csrc/*.?pp", "csrc/*.cu*")))
    yield Count("lines in bench/results", lines(tracked("bench/results")))
    pages = tracked("*.md")
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in pages)
    yield Count("words of documentation", words)


def main() -> int:
    """Print all counts; return the number of those above their limit."""
    found = list(counts())
    for count in found:
        print(count)
    above = [count.name for count in found if count.passes_limit]
    for name in above:
        print(f"error: {name} is above its limit", file=sys.stderr)
    return len(above)


if __name__ == "__main__":
    raise SystemExit(main())
