"""What a machine offers, as the server divides it."""

import pytest

from serve.server.device import Device


@pytest.mark.parametrize(
    ("lane_cores", "host_cores"),
    [
        (((4,), (5,)), (4,)),
        (((0,),) * 3, (0,)),
        (tuple((core % 16,) for core in range(64)), (0, 1)),
        (((),) * 4, ()),
    ],
)
def test_the_servers_own_threads_get_the_first_core_in_eight(lane_cores, host_cores):
    device = Device("cpu", 1 << 30, lane_cores, parallelism=2, can_suspend=True)
    assert device.host_cores == host_cores
