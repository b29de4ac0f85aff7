"""Makes the rig importable and closes every edge that a test has made."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def make_edge(tmp_path):
    from field_rig import Edge

    made = []

    def make(**arguments):
        made.append(Edge(tmp_path, **arguments))
        return made[-1]

    yield make
    for edge in made:
        edge.close()


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Tiny layers: threads that wait for each other take longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
