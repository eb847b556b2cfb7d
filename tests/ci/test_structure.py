"""The house keeps its limits: `.ci/structure.py` counts, and says what is above one."""

import ast
import importlib.util

import pytest

from bench.kit.result import ROOT

SPEC = importlib.util.spec_from_file_location("structure", ROOT / ".ci" / "structure.py")
structure = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(structure)


def test_no_count_is_above_its_limit():
    found = list(structure.counts())
    assert [str(count) for count in found if count.passes_limit] == []
    assert {count.name for count in found} >= set(structure.LIMITS)
    assert {"largest class", "most attributes"} <= set(structure.LIMITS)


def test_what_is_above_its_limit_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(structure, "LIMITS", {"largest file": 600, "import circles": 0})
    made = [structure.Count("largest file", 601, ("one.py",)), structure.Count("import circles", 0)]
    monkeypatch.setattr(structure, "counts", lambda: iter(made))
    assert structure.main() == 1
    said = capsys.readouterr()
    assert "601  largest file (limit 600)  one.py" in said.out
    assert said.err == "error: largest file is above its limit\n"


def test_all_that_is_above_a_limit_is_named():
    sizes = [(10, "small"), (601, "one"), (700, "other")]
    assert structure.largest("largest file", sizes) == structure.Count(
        "largest file", 700, ("other", "one")
    )
    assert structure.largest("files", sizes).of == ("other",)


@pytest.mark.parametrize(
    ("body", "attributes", "arguments"),
    [
        ("def __init__(self, a, *, b=1): self.a, self.b = a, b", 2, 2),
        ("x: int\n    def go(self): self.y = 1; self.y = 2", 1, 0),
    ],
)
def test_a_class_is_measured(body, attributes, arguments):
    (node,) = ast.parse(f"class One:\n    {body}\n").body
    assert structure.attributes(node) == attributes
    assert structure.arguments(node) == arguments
    assert structure.height(node) == 1 + len(body.splitlines())


def test_circles_are_found_also_where_only_types_are_imported(tmp_path, monkeypatch):
    package = tmp_path / "circling"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("from circling.two import b\n")
    (package / "two.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from circling.one import a\n"
    )
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    monkeypatch.setattr(structure, "PACKAGES", ("circling",))
    assert structure.circles() == ["circling.one + circling.two"]
