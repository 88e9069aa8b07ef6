"""Tests compare fused training with plain PyTorch, so an array must not choose plain PyTorch for its speed."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def fused_where_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFTA_TUNE_STRATEGY", "vmap")
