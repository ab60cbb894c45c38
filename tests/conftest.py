"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles without optimizations, except where a module looks at what the compiler makes (`OPTIMIZED = True`)."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not getattr(request.module, "OPTIMIZED", False))
    yield
    jax.config.update("jax_disable_most_optimizations", before)
