"""Tests that run Triton kernels in the interpreter, in a process of their own: one that interprets cannot compile."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("a process of its own is needed: TRITON_INTERPRET=1 pytest tests/kernels/interpret")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what `torch.empty` returns with NaN, so that scratch and results that were not written show."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    seed = int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(seed)
    print(f"torch.manual_seed({seed})")  # shown with a failure
    yield
    torch.use_deterministic_algorithms(before)
