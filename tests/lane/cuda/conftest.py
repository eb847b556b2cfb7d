"""Captured runs on a device that is the processor."""

import pytest

from serve.lane.cuda.queues import HostQueue


@pytest.fixture
def launches(monkeypatch):
    """The replays launched."""
    found = []
    capture = HostQueue.capture

    def watched(self, work):
        run = capture(self, work)
        launch = run.launch

        def counted():
            found.append(run)
            launch()

        run.launch = counted
        return run

    monkeypatch.setattr(HostQueue, "capture", watched)
    return found
