"""What a running server takes of a configuration that is read again."""

import re
from pathlib import Path

import msgspec
import pytest

from serve.config import RELOADABLE, Config, effective_values, load_config
from serve.config_changes import changes, with_reloadable
from serve.config_schema import schema
from serve.config_settings import keys_of


def config_of(tmp_path, text):
    path = tmp_path / "server.toml"
    path.write_text(text)
    return load_config(path)


def test_every_reloadable_key_exists():
    assert {key for key, _ in keys_of(Config)} >= RELOADABLE


def test_the_schema_and_the_table_mark_them(tmp_path):
    marked = set()
    for section, place in schema()["properties"].items():
        if "$ref" in place:
            kind = schema()["$defs"][place["$ref"].rpartition("/")[2]]["properties"]
            marked |= {f"{section}.{name}" for name, facts in kind.items()
                       if facts.get("x-reloadable")}  # fmt: skip
    assert marked == RELOADABLE
    path = tmp_path / "server.toml"
    path.write_text('[[graph]]\nname = "a"\nfile = "a.npz"\n')
    assert {one.key for one in effective_values(path) if one.reloadable} == RELOADABLE


def test_the_operators_page_lists_them():
    page = (Path(__file__).parents[2] / "docs" / "operators.md").read_text()
    rows = page.partition("| section | keys |")[2].partition("\n\n")[0]
    told = set(re.findall(r"`(\w+)`", rows))
    assert told == {key.partition(".")[2] for key in RELOADABLE}


@pytest.mark.parametrize("key", sorted(RELOADABLE))
def test_a_reloadable_key_is_taken(key):
    section, name = key.split(".")
    marker = object()
    fresh = msgspec.structs.replace(
        Config(), **{section: msgspec.structs.replace(getattr(Config(), section), **{name: marker})}
    )
    taken = with_reloadable(Config(), fresh)
    assert getattr(getattr(taken, section), name) is marker
    assert with_reloadable(taken, Config()) == Config()


def test_changes_are_told_by_key_and_only_some_are_taken(tmp_path):
    before = config_of(tmp_path, '[server]\nmax_queue = 3\nhost = "127.0.0.1"\n')
    after = config_of(
        tmp_path,
        '[server]\nmax_queue = 4\nhost = "::1"\n[report]\nkeep = "1d"\n'
        '[[graph]]\nname = "g"\nfile = "g.npz"\n',
    )
    found = {change.key: change for change in changes(before, after)}
    assert set(found) == {"server.host", "server.max_queue", "report.keep", "graph"}
    assert str(found["server.max_queue"]) == "server.max_queue: 3 to 4"
    assert str(found["report.keep"]) == 'report.keep: null to "1d"'
    assert [key for key, change in found.items() if not change.reloadable] == [
        "server.host", "graph",
    ]  # fmt: skip
    taken = with_reloadable(before, after)
    assert (taken.server.max_queue, taken.server.host) == (4, "127.0.0.1")
    assert (taken.report.keep, taken.graph) == ("1d", ())
    assert changes(before, before) == []
