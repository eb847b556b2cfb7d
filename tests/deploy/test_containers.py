"""The files for containers say what the server understands, and keep their own rules."""

import copy
import json
import re
import shutil
import subprocess

import jsonschema
import pytest
import referencing
import referencing.jsonschema
import yaml  # type: ignore[import-untyped]

from bench.kit.servers import ROOT
from bench.kit.waiting import PATIENCE_S
from serve.config import load_config
from serve.config_settings import settings_of

CONTAINERFILE = (ROOT / "Containerfile").read_text()
KINDS = {
    one["kind"]: one for one in yaml.safe_load_all((ROOT / "configs/kubernetes.yaml").read_text())
}
POD = KINDS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
#: Of each release of Kubernetes, as `.ci/packages` installs them.
SCHEMAS = ROOT / "build/schemas/kubernetes_validate/kubernetes-json-schema"
COMPOSE = yaml.safe_load((ROOT / "configs/compose.yaml").read_text())


@pytest.fixture
def config(tmp_path):
    """The configuration of the pods."""
    path = tmp_path / "gnnserve.toml"
    path.write_text(KINDS["ConfigMap"]["data"]["gnnserve.toml"])
    return load_config(path)


def image_variables():
    return dict(re.findall(r"(GNNSERVE__\w+)=(\S+)", CONTAINERFILE))


def user():
    return int(re.search(r"^USER (\d+):\d+$", CONTAINERFILE, re.M)[1])


def test_the_image_takes_the_files_that_a_build_needs():
    for line in re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M):
        assert (ROOT / line).exists(), line
    assert user() != 0


def test_the_variables_of_image_and_composition_are_keys(tmp_path):
    path = tmp_path / "empty.toml"
    path.touch()
    found = image_variables() | COMPOSE["services"]["gnnserve"]["environment"]
    config = load_config(path, settings_of(found, []))
    assert str(config.path(config.report.database)) == "/var/lib/gnnserve/gnnserve.db"
    assert config.server.host == "0.0.0.0"


def test_a_pod_is_not_root_and_writes_to_its_volumes_only(config):
    assert POD["securityContext"]["runAsUser"] == user()
    assert POD["securityContext"]["runAsNonRoot"]
    own = CONTAINER["securityContext"]
    assert own["readOnlyRootFilesystem"]
    assert not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    mounted = {one["mountPath"] for one in CONTAINER["volumeMounts"] if not one.get("readOnly")}
    # Lanes run code from the cache, so it must be the server's own, which no volume's root is.
    assert mounted == {"/tmp", str(config.cache_path().parent), "/var/lib/gnnserve"}
    assert {one["name"] for one in CONTAINER["volumeMounts"]} == {v["name"] for v in POD["volumes"]}


def test_a_pod_has_time_to_stop(config):
    server = config.server
    stop_s = server.shutdown_delay_s + server.drain_timeout_s + server.stop_timeout_s
    assert POD["terminationGracePeriodSeconds"] > stop_s
    # Nobody sends requests once readiness has failed for its threshold.
    probe = CONTAINER["readinessProbe"]
    assert server.shutdown_delay_s > probe["periodSeconds"] * probe["failureThreshold"]


def test_probes_and_ports_are_those_of_the_server(config):
    ports = {one["name"]: one["containerPort"] for one in CONTAINER["ports"]}
    assert ports == {"grpc": config.server.grpc_port, "http": config.server.http_port}
    for name, path in (("startup", "ready"), ("liveness", "live"), ("readiness", "ready")):
        get = CONTAINER[f"{name}Probe"]["httpGet"]
        assert get == {"path": f"/v2/health/{path}", "port": "http"}
    assert {one["targetPort"] for one in KINDS["Service"]["spec"]["ports"]} == ports.keys()
    labels = KINDS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert KINDS["Service"]["spec"]["selector"] == labels
    assert KINDS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels


def schema_of(manifest, release):
    """The strict schema of an object, which allows no unknown field; None for none."""
    name = "-".join(
        [manifest["kind"].lower(), *manifest["apiVersion"].removesuffix(".k8s.io").split("/")]
    )
    path = SCHEMAS / f"v{release}.0-local-strict" / f"{name}.json"
    if not path.exists():
        return None
    base = referencing.Resource.from_contents(
        json.loads(path.read_text()), default_specification=referencing.jsonschema.DRAFT7
    )

    def retrieve(uri):
        text = (path.parent / uri.rpartition("/")[2]).read_text()
        return referencing.Resource.from_contents(
            json.loads(text), default_specification=referencing.jsonschema.DRAFT7
        )

    registry = referencing.Registry(retrieve=retrieve).with_resource(path.name, base)
    return jsonschema.Draft7Validator(base.contents, registry=registry)


@pytest.mark.skipif(not SCHEMAS.exists(), reason="schemas of Kubernetes are not there")
@pytest.mark.parametrize("release", ["1.28", "1.33", "1.37"])
def test_manifests_fit_the_schemas_of_kubernetes(release):
    for kind, manifest in KINDS.items():
        schema = schema_of(manifest, release)
        assert schema is not None, kind
        assert [error.message for error in schema.iter_errors(manifest)] == [], kind


#: What to change in the deployment, and to what: mistakes that a cluster would refuse.
WRONG_DEPLOYMENTS = {
    "a misspelt field": (("spec", "template", "spec", "securityContexts"), {}),
    "a number as text": (("spec", "replicas"), "two"),
    "a list as an object": (("spec", "template", "spec", "containers"), {}),
    "a text as a number": (("spec", "template", "spec", "terminationGracePeriodSeconds"), "60s"),
}


@pytest.mark.skipif(not SCHEMAS.exists(), reason="schemas of Kubernetes are not there")
@pytest.mark.parametrize("wrong", WRONG_DEPLOYMENTS)
def test_the_schemas_notice_mistakes(wrong):
    (*way, last), value = WRONG_DEPLOYMENTS[wrong]
    manifest = copy.deepcopy(KINDS["Deployment"])
    place = manifest
    for name in way:
        place = place[name]
    place[last] = value
    assert list(schema_of(manifest, "1.37").iter_errors(manifest))


def test_the_composition_mounts_files_that_are_there():
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / "configs" / source).exists(), name
            else:
                assert source in COMPOSE["volumes"], name
        for one in service.get("ports", ()):
            assert one.startswith("127.0.0.1:"), name
        for one in service.get("configs", ()):
            assert yaml.safe_load(COMPOSE["configs"][one["source"]]["content"])["apiVersion"] == 1


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_its_configuration():
    done = subprocess.run(
        ["promtool", "check", "config", str(ROOT / "configs" / "prometheus.yml")],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
