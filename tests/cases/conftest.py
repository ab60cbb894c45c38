"""Fixtures of the tests made from public bug reports."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(params=["classic", "remat3"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test under each of JAX's remat implementations, whichever is in force outside."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param == "remat3")
    yield request.param
    jax.config.update("jax_remat3", before)
