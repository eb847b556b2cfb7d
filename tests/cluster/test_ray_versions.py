"""What is asked of Ray's private names: the test that fails first with another release."""

import re
import warnings

import pytest

from serve.errors import ConfigError


class Server:
    """What Serve would run."""


@pytest.fixture(scope="module")
def control():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'gnnserve[cluster]'")
    with warnings.catch_warnings(action="ignore"):  # Ray's own, of pydantic
        from serve.cluster import ray_control
    return ray_control


def test_this_ray_lets_a_deployment_keep_its_version(control):
    deployment = control.ray_serve.deployment(Server, num_replicas=2)
    assert control.versioned(deployment, "as it was").version == "as it was"


class WithoutArgument:
    def options(self, num_replicas=1):
        raise AssertionError


class WithoutEffect:
    version = None

    def options(self, **_options):
        return self


class Removed:
    def options(self, **_options):
        raise ValueError("`version` has been removed")


@pytest.mark.parametrize("other", [WithoutArgument, WithoutEffect, Removed])
def test_with_a_ray_that_does_not_it_says_so_before_servers_start_anew(control, other):
    release = re.escape(control.ray.__version__)
    said = f"Ray {release}: its deployments take no version .* install Ray "
    with pytest.raises(ConfigError, match=said):
        control.versioned(other(), "1")
