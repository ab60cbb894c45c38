"""What all tests share."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator

import jax
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, default=1, metavar="N", help="run one test in N, always the same ones")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def drawn(item: pytest.Item) -> bool:
        return zlib.crc32(item.nodeid.encode()) % config.getoption("--sample") == 0

    if dropped := [item for item in items if not drawn(item)]:
        config.hook.pytest_deselected(items=dropped)
        items[:] = filter(drawn, items)


def pytest_configure(config: pytest.Config) -> None:
    # What is compiled is remembered for one run of the tests: the processes of pytest-xdist share it.
    if "REMAT_KIT_CACHE" not in os.environ:
        os.environ["REMAT_KIT_CACHE"] = tempfile.mkdtemp(prefix="remat-kit-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop("REMAT_KIT_CACHE"), ignore_errors=True))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `tpu` and `cuda` compile for real; without the compilers they are skipped, or fail where asked."""
    from remat_kit import targets

    for platform in ("tpu", "cuda"):
        if item.get_closest_marker(platform) is None:
            continue
        missing = next(t.missing for t in targets() if t.spec.startswith(f"{platform}:"))
        if missing and os.environ.get("REMAT_KIT_REQUIRE_TARGETS"):
            pytest.fail(f"REMAT_KIT_REQUIRE_TARGETS is set, but {missing}")
        if missing:
            pytest.skip(missing)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles without optimizations, except where a module looks at what the compiler makes (`OPTIMIZED = True`)."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not getattr(request.module, "OPTIMIZED", False))
    yield
    jax.config.update("jax_disable_most_optimizations", before)
