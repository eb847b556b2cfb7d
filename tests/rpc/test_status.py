"""Every error has a place on the wire."""

import logging
from urllib.parse import quote

import grpc
import pytest

import serve.errors
from serve import client
from serve.client.errors import ClientError, error_for
from serve.errors import ErrorCode, InvariantViolation, QueueFull, ServeError
from serve.rpc.status import INTERNAL_TEXT, MAX_TEXT, MOST_HEADER_BYTES, status_of
from serve.server.report_rows import refusal_record
from serve.wire.messages import WireError

EXPECTED = {
    "ConfigError": "INVALID_ARGUMENT",
    "InvalidInput": "INVALID_ARGUMENT",
    "UnknownName": "NOT_FOUND",
    "Mismatch": "FAILED_PRECONDITION",
    "NotReady": "UNAVAILABLE",
    "VersionReplaced": "UNAVAILABLE",
    "TooBig": "RESOURCE_EXHAUSTED",
    "QueueFull": "RESOURCE_EXHAUSTED",
    "DeadlineExceeded": "DEADLINE_EXCEEDED",
    "RequestCancelled": "CANCELLED",
    "ModelError": "INTERNAL",
    "NotIdentified": "UNAUTHENTICATED",
    "NotPermitted": "PERMISSION_DENIED",
    "NameTaken": "ALREADY_EXISTS",
    "Unsupported": "UNIMPLEMENTED",
    "InvariantViolation": "INTERNAL",
    "ServeError": "INTERNAL",
}
RAISED = {
    "INVALID_ARGUMENT": client.InvalidRequest,
    "NOT_FOUND": client.NotFound,
    "ALREADY_EXISTS": client.AlreadyExists,
    "FAILED_PRECONDITION": client.Mismatched,
    "UNAVAILABLE": client.Unavailable,
    "UNAUTHENTICATED": client.Unauthenticated,
    "PERMISSION_DENIED": client.Forbidden,
    "RESOURCE_EXHAUSTED": client.Exhausted,
    "DEADLINE_EXCEEDED": client.TimedOut,
    "CANCELLED": client.Cancelled,
    "UNIMPLEMENTED": client.NotOffered,
    "INTERNAL": client.ServerFault,
}


def error_classes():
    found = vars(serve.errors).values()
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, ServeError)]


def make(kind):
    return kind("the text", 1_500_000) if kind is QueueFull else kind("the text")


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_every_error_has_its_code_and_keeps_its_text(kind):
    status = status_of(make(kind))
    assert status.code is grpc.StatusCode[EXPECTED[kind.__name__]]
    bug = kind is InvariantViolation
    assert status.text == (INTERNAL_TEXT if bug else "the text")
    assert status.retry_after_ms == (2 if kind is QueueFull else None)


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_every_error_has_its_name_in_the_report_and_its_class_at_the_client(kind):
    record = refusal_record("uid", "gcn", "1", "ours", 0, make(kind))
    assert record.status == EXPECTED[kind.__name__]
    assert record.reason
    assert type(error_for(record.status, "the text")) is RAISED[record.status]


def test_malformed_messages_are_the_clients_fault():
    assert status_of(WireError("bad bytes")).code is grpc.StatusCode.INVALID_ARGUMENT


def test_bugs_are_logged_in_full_and_told_in_short(caplog):
    with caplog.at_level(logging.ERROR):
        status = status_of(KeyError("secret"))
    assert (status.code, status.text) == (grpc.StatusCode.INTERNAL, INTERNAL_TEXT)
    assert "secret" in caplog.text


def test_texts_stay_within_what_a_header_can_carry():
    text = status_of(serve.errors.ModelError("m" * 10_000)).text
    assert len(text) == MAX_TEXT
    assert text.endswith("m…")


@pytest.mark.parametrize("character", ["é", "语", "😀", "%", "\n"])
def test_a_text_in_any_script_stays_within_a_header(character):
    for given in (character * 10_000, "m" * 500 + character * 500):
        text = status_of(serve.errors.ModelError(given)).text
        assert len(quote(text, safe="")) <= MOST_HEADER_BYTES
        assert len(quote(text + character, safe="")) > MOST_HEADER_BYTES or len(text) == MAX_TEXT
        assert text[:-1] == given[: len(text) - 1]


def test_every_code_has_one_class_of_the_client():
    assert {kind.kind for kind in ClientError.__subclasses__()} == set(ErrorCode)
    assert len(ClientError.__subclasses__()) == len(ErrorCode)


def test_an_error_of_the_client_itself_has_the_code_of_its_class():
    error = client.InvalidRequest.local("no graph")
    assert (error.code, str(error)) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT: no graph")
