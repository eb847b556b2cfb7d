"""A result says where it is from, and takes a line for each row."""

import json

from bench.kit.result import envelope, one_row_a_line, write_result


def test_the_envelope_tells_commit_date_command_machine_and_load():
    told = envelope()
    assert list(told) == ["commit", "date", "command", "machine", "load_average"]
    assert told["command"].startswith("python")
    assert len(told["load_average"]) == 3


def test_a_result_reads_back_as_it_was_written(tmp_path):
    content = {
        "rows": [{"a": 1}, {"a": 2}],
        "nested": {"x": {"y": [1, 2]}, "z": 3},
        "plain": [1, 2],
    }
    write_result(tmp_path / "new" / "one.json", content)
    read = json.loads((tmp_path / "new" / "one.json").read_text())
    assert {key: read[key] for key in content} == content


def test_each_row_takes_one_line():
    text = one_row_a_line({"rows": [{"a": 1}, {"a": 2}], "other": 3})
    assert text.splitlines() == ["{", '"rows": [', '{"a": 1},', '{"a": 2}', "],", '"other": 3', "}"]
