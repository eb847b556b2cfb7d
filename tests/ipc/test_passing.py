"""Copies of models' files go to lanes as descriptors."""

import os
import socket
from pathlib import Path

import pytest

from serve.ipc import passing
from serve.ipc.messages import ProbeModel, UnloadModel
from serve.models.repository import find
from serve.models.sealed_copies import SealedCopies
from tests.e2e.support import REPOSITORY


@pytest.fixture
def channel():
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield pair
    for side in pair:
        side.close()


@pytest.fixture
def copies():
    found = SealedCopies(find(REPOSITORY, "gcn"))
    yield found
    found.close()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def load(spec) -> ProbeModel:
    return ProbeModel(spec, budget_s=1.0, max_bytes=1)


def test_a_copy_is_read_though_the_sender_has_closed_it(channel, copies):
    ours, theirs = channel
    weights = Path(copies.spec.copied_weights).read_bytes()
    before = open_files()
    passing.send(ours, load(copies.spec))
    passing.send(ours, UnloadModel("gcn"))
    copies.close()
    received = passing.receive(theirs)
    assert received.spec.copied_weights.startswith("/proc/self/fd/")
    assert received.spec.copied_source == copies.spec.copied_source == ""
    assert Path(received.spec.copied_weights).read_bytes() == weights
    assert passing.receive(theirs) == UnloadModel("gcn")
    passing.close_copies(received.spec)
    passing.close_copies(received.spec)  # as after a model that closed them
    assert open_files() == before - 1


def test_a_message_without_copies_brings_none(channel):
    ours, theirs = channel
    message = load(find(REPOSITORY, "gcn"))
    before = open_files()
    passing.send(ours, message)
    assert passing.receive(theirs) == message
    assert open_files() == before
    ours.close()
    assert passing.receive(theirs) is None


def test_copies_that_are_closed_are_not_sent(channel, copies):
    copies.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        passing.send(channel[0], load(copies.spec))
