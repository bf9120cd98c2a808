"""The cluster that the tests of this folder share; other folders import the fixture."""

import pytest

from tests.slurm import cluster as slurm


@pytest.fixture(scope="module")
def cluster():
    """A real Slurm of three nodes with eight fake GPUs each, without accounting."""
    if (reason := slurm.unavailable()) is not None:
        pytest.skip(reason)
    with slurm.running(nodes=3, gpus=8) as started:
        yield started
