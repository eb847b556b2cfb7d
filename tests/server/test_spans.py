"""Spans of a request: links to the others of its group."""

import pytest

pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry.sdk.resources import Resource

from serve.obs.trace_ids import trace_of
from serve.server.tracing.spans import GroupMates, spans_of
from tests.obs.builders import record, unanswered

RESOURCE = Resource.create({})


def linked(records, asked, mates=None):
    """The ids of the requests that the span of `asked` links to."""
    mates = mates or GroupMates()
    mates.add(records, 1.0)
    root, *inner = spans_of(asked, 1.0, RESOURCE, mates.links(asked))
    assert not any(span.links for span in inner)
    by_ids = {
        (int(ids.trace_id, 16), int(ids.span_id, 16)): one.request_uid
        for one in records
        if (ids := trace_of(one, 1.0))
    }
    return [by_ids[link.context.trace_id, link.context.span_id] for link in root.links]


def test_a_request_is_linked_to_the_others_of_its_group():
    group = [record(uid, group_id=7, group_size=3) for uid in "abc"]
    others = [record("d", group_id=8, group_size=2), record("e", group_id=9)]
    refused = unanswered("f", "CANCELLED", "cancelled")
    everybody = [*group, *others, refused]
    assert linked(everybody, group[0]) == ["b", "c"]
    assert linked(everybody, group[2]) == ["a", "b"]
    for alone in (*others, refused):
        assert linked(everybody, alone) == []


def test_requests_that_are_not_traced_are_linked_to_by_nobody():
    silent = record("s", group_id=7, group_size=2, trace_parent=f"00-{1:032x}-{1:016x}-00")
    asked = record("a", group_id=7, group_size=2)
    assert linked([silent, asked], asked) == []


def test_groups_of_a_while_ago_are_forgotten():
    mates = GroupMates(most_groups=2, most_links=2)
    old = [record(uid, group_id=0, group_size=2) for uid in "ab"]
    mates.add(old, 1.0)
    mates.add([record(f"{n}", group_id=n, group_size=2) for n in (1, 2)], 1.0)
    assert mates.links(old[0]) == []
    many = [record(f"m{n}", group_id=3, group_size=9) for n in range(9)]
    assert linked(many, many[0], mates) == ["m7", "m8"]
