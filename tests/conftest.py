"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes, and making it up, is up to what else the machine does.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
