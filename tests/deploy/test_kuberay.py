"""The files for KubeRay say what the server, Ray and the image understand."""

import re
import tomllib

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement

from bench.kit.servers import ROOT
from serve.cluster.replica import FOLDER_VARIABLE, require_reachable, stop_limit_s
from serve.cluster.server_need import server_need, unplaceable
from serve.config import load_config
from tests.deploy.test_containers import CONTAINERFILE, user
from tests.docs.pages import texts

KINDS = {
    one["kind"]: one for one in yaml.safe_load_all((ROOT / "configs/kuberay.yaml").read_text())
}
SPEC = KINDS["RayCluster"]["spec"]
(GROUP,) = SPEC["workerGroupSpecs"]
HEAD, SERVER = (one["template"] for one in (SPEC["headGroupSpec"], GROUP))
PODS = pytest.mark.parametrize("pod", [HEAD["spec"], SERVER["spec"]], ids=["head", "server"])
#: What the page has the head do.
APPLY, UP = (line.split() for (text,) in [texts("docs/cluster.md", "sh", "kuberay")]
             for line in text.strip().splitlines())  # fmt: skip


def option(name):
    return UP[UP.index(f"--{name}") + 1]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "gnnserve.toml"
    path.write_text(KINDS["ConfigMap"]["data"]["gnnserve.toml"])
    (tmp_path / "models").mkdir()
    return load_config(path)


def test_its_ray_is_one_that_the_package_asks_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (ray,) = (one for one in map(Requirement, extras["cluster"]) if one.name == "ray")
    assert SPEC["rayVersion"] in ray.specifier
    assert ray.extras == {"serve"}
    assert "ARG EXTRAS=" in CONTAINERFILE


@PODS
def test_a_pod_is_not_root_and_writes_to_its_volumes_only(pod, config):
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == user()
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {one["name"]: one for one in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    written = {one["mountPath"] for one in mounted.values() if not one.get("readOnly")}
    variables = {one["name"]: one["value"] for one in container["env"]}
    # Ray's sessions and sockets are in /tmp.
    # Lanes run code from the cache, so it must be the server's own, which no volume's root is.
    assert written == {"/tmp", str(config.cache_path().parent), variables[FOLDER_VARIABLE]}
    assert re.search(rf"install -d .* {variables[FOLDER_VARIABLE]}\b", CONTAINERFILE)


def test_each_machine_has_the_memory_for_its_server(config, tmp_path):
    (container,) = SERVER["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert container["resources"]["requests"] == limits
    gib = int(re.fullmatch(r"(\d+)Gi", limits["memory"])[1])
    # Ray leaves itself a part of it.
    machines = {str(number): int(0.7 * (gib << 30)) for number in range(GROUP["replicas"])}
    need = server_need(
        type(config)(
            models=type(config.models)(repository=str(tmp_path / "models")), device=config.device
        ),
        on_gpus=False,
    )
    assert unplaceable(need, GROUP["replicas"], machines) is None
    assert SPEC["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_servers_are_reached_and_have_time_to_stop(config):
    require_reachable(config, "10.0.0.7")
    assert SERVER["spec"]["terminationGracePeriodSeconds"] > stop_limit_s(config)
    (container,) = SERVER["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"grpc": config.server.grpc_port, "http": config.server.http_port}
    annotations = SERVER["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.server.http_port)


def test_the_service_is_the_front_of_the_head():
    service = KINDS["Service"]["spec"]
    assert service["selector"].items() <= HEAD["metadata"]["labels"].items()
    assert not service["selector"].items() <= SERVER["metadata"]["labels"].items()
    (container,) = HEAD["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    (front,) = service["ports"]
    assert ports[front["targetPort"]] == front["port"] == int(option("port"))


def test_the_page_names_what_is_there():
    assert (ROOT / APPLY[-1]).exists()
    name = KINDS["RayCluster"]["metadata"]["name"]
    assert f"svc/{name}-head-svc" in UP
    assert int(option("replicas")) == GROUP["replicas"]
    (mounted,) = (one for one in HEAD["spec"]["containers"][0]["volumeMounts"]
                  if one["name"] == "config")  # fmt: skip
    assert option("config") == f"{mounted['mountPath']}/{next(iter(KINDS['ConfigMap']['data']))}"
