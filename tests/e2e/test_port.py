"""The HTTP port knows whether the gRPC port answers."""

from email.message import Message
from http import HTTPStatus

import msgspec
import pytest

from serve.commands.serve import Application
from serve.config import Config, ModelsConfig, ReportConfig, ServerConfig
from serve.resources import configs_path
from serve.server.engine import Engine


@pytest.fixture
def application(tmp_path):
    """One that is put together and not started."""
    config = Config(
        server=ServerConfig(grpc_port=0, http_port=0),
        models=ModelsConfig(repository=str(configs_path() / "models"), cache=str(tmp_path)),
        report=ReportConfig(database=str(tmp_path / "gnnserve.db")),
    )
    made = Application(msgspec.structs.replace(config, base=tmp_path))
    yield made
    made._rpc.stop(0.0)
    made._close()


def test_live_and_ready_are_so_only_while_the_grpc_port_answers(application, monkeypatch):
    def asked(path):
        status, _, body = application._http._answer(path, Message(), ())
        return status, body

    monkeypatch.setattr(Engine, "live", True)
    monkeypatch.setattr(Engine, "ready", True)
    probes = "/v2/health/live", "/v2/health/ready"
    for answers, status in ((True, HTTPStatus.OK), (False, HTTPStatus.SERVICE_UNAVAILABLE)):
        monkeypatch.setattr(application._rpc._watchdog, "_answers", answers)
        assert [asked(path)[0] for path in probes] == [status, status]
        _, metrics = asked("/metrics")
        assert b"gnnserve_grpc_port_answers %.1f\n" % answers in metrics
        assert b'gnnserve_transport_refused_total{reason="no_thread"} 0.0\n' in metrics
