"""Tests that compile Triton kernels: a process of their own, since one that interprets cannot compile."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    raise pytest.UsageError("a process of its own is needed: pytest tests/kernels/compile without TRITON_INTERPRET")
