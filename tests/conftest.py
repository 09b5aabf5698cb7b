"""What every test gets: both event loops, deterministic examples."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Several test files run at once: compute threads that wait for each other would wait for the other files as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every run: a failure seen once is seen again. `--hypothesis-profile=thorough` looks further.
settings.register_profile(
    "quick", derandomize=True, deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quick")


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every ``@pytest.mark.anyio`` test runs on both; a module that is asyncio's alone overrides this."""
    return request.param
