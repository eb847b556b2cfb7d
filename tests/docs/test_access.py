"""docs/access.md: its recipe makes a server that encrypts and wants tokens."""

import re

import pytest

from serve.access.certificates import Certificates
from serve.client import Client, Forbidden, Unauthenticated
from serve.commands.configured import access_settings, certificate_files
from serve.config import ServerConfig, load_config
from serve.rpc.server import GrpcServer
from tests.access.certs import needs_openssl
from tests.docs.pages import PAGES, texts
from tests.docs.test_operators import run
from tests.rpc.fakes import FACTS, FakeEngine


@needs_openssl
def test_the_recipe_works(tmp_path):
    certificates, tokens = texts("docs/access.md", "sh", "access")
    done = run(certificates, tmp_path)
    assert done.returncode == 0, done.stderr
    done = run(tokens, tmp_path)
    assert done.returncode == 0, done.stderr
    mobile, grafana, *_ = re.findall(r"^gnn_\S+$", done.stdout, re.M)
    config = tmp_path / "gnnserve.toml"
    config.write_text(
        "\n".join(
            text for mark in ("tls", "tokens") for text in texts("docs/access.md", "toml", mark)
        )
    )
    loaded = load_config(config)
    server = GrpcServer(
        FakeEngine(), lambda: FACTS, lambda _: {},
        ServerConfig(grpc_port=0, admin_socket=str(tmp_path / "admin.sock")),
        callers=access_settings(loaded).callers(),
        certificates=Certificates(certificate_files(loaded)),
    )  # fmt: skip
    target = f"https://localhost:{server.start()}"
    trusted = tmp_path / "authority.crt"
    try:
        with Client(target, credentials=trusted, token=mobile) as client:
            assert client.describe().version == FACTS.version
            with pytest.raises(Forbidden):
                client.load("gcn")
        with (
            Client(target, credentials=trusted, token=grafana) as client,
            pytest.raises(Unauthenticated),
        ):
            client.describe()
    finally:
        server.stop(2.0)


def test_the_table_of_roles_names_roles():
    rows = re.findall(r"^\| `(\w+)` \|", PAGES["docs/access.md"], re.M)
    assert rows == ["infer", "observe", "admin"]
