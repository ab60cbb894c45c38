"""What can be compiled for: names, sizes, meshes, and what is said where something is missing."""

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import remat_kit as rk
from remat_kit._target import installed as compilers
from remat_kit._target.chips import CHIPS


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(compilers, "missing", lambda platform: "")


@pytest.mark.parametrize(
    "spec, devices, topology",
    [
        ("tpu:v5e", 1, "v5e:2x2"),
        ("tpu:v5e:1x1", 1, "v5e:2x2"),
        ("tpu:v5e:4x4", 16, "v5e:4x4"),
        ("tpu:v5e:2x4", 8, "v5e:2x4"),
        ("tpu:v6e:8x16", 128, "v6e:8x16"),
        ("tpu:v5p:4x8x12", 384, "v5p:4x8x12"),
        ("tpu:v5p:2x2x1", 4, "v5p:2x2x1"),
        ("tpu:v5p", 1, "v5p:2x2x1"),
        ("tpu:v4:2x2x2", 8, "v4:2x2x2"),
        ("cuda:h100", 1, "1x1x1"),
        ("cuda:a100:8", 8, "1x1x8"),
    ],
)
def test_names_and_sizes(installed, spec, devices, topology):
    target = rk.target(spec)
    assert (target.device_count, target.topology, str(target)) == (devices, topology, spec)
    assert not target.attached and target.devices == ()
    assert rk.target(target) is target


@pytest.mark.parametrize(
    "spec, words",
    [
        ("tpu:v5", "tpu:v5e"),
        ("gpu:h100", "cuda:h100"),
        ("h100", "unknown target"),
        ("", "unknown target"),
        ("tpu:v5e:4", "4x4"),
        ("tpu:v5e:4x4x4", "4x4"),
        ("tpu:v5p:2x2", "2x2x1"),
        ("tpu:v5e:0x4", "no size"),
        ("tpu:v5e:" + "9" * 5000 + "x1", "no size"),
        ("cuda:h100:2x2", "1 to 4096 GPUs"),
        ("cuda:h100:-1", "no size"),
        ("cuda:h100:20000", "1 to 4096"),
        ("tpu:v5e:3x3", "8x16"),
        ("tpu:v5e:32x32", "16x16"),
        ("tpu:v5p:1x1x3", "multiples of 4"),
        ("tpu:v4:64x64x64", "4096 chips"),
        (None, "a string"),
        (5, "a string"),
    ],
)
def test_what_is_no_target(installed, spec, words):
    with pytest.raises(rk.RematError, match=words):
        rk.target(spec)


@pytest.mark.parametrize("spec, package", [("tpu:v5e", "remat-kit[tpu]"), ("cuda:h100", "remat-kit[cuda]")])
def test_a_missing_compiler_is_named(monkeypatch, spec, package):
    monkeypatch.setattr(compilers, "_found", lambda name: False)
    with pytest.raises(rk.RematError) as error:
        rk.target(spec)
    assert f"pip install '{package}'" in str(error.value)
    info = next(t for t in rk.targets() if t.spec == spec)
    assert not info.usable and package in info.missing


def test_targets_lists_every_chip_and_the_attached_devices():
    found = {t.spec: t for t in rk.targets()}
    assert {"local", "cpu", *CHIPS} == set(found)
    assert found["cpu"].usable and found["tpu:v5e"].memory_bytes == int(15.75 * 2**30)


def test_attached_devices():
    local = rk.target("local")
    assert local.attached and local.device_count == len(jax.local_devices()) and local.devices[0] in jax.devices()
    assert rk.target("cpu").platform == "cpu"


def test_a_mesh_without_devices(installed):
    mesh = rk.target("tpu:v5e:4x4").mesh(("data", "model"), (8, 2))
    assert isinstance(mesh, AbstractMesh) and dict(mesh.shape) == {"data": 8, "model": 2}
    assert NamedSharding(mesh, PartitionSpec("data")).shard_shape((16, 4)) == (2, 4)


def test_a_mesh_of_attached_devices():
    mesh = rk.target("cpu").mesh(("data",), (1,))
    assert list(mesh.devices.flat) == list(jax.local_devices(backend="cpu")[:1])


@pytest.mark.parametrize(
    "names, shape, words",
    [
        (("data",), (32,), "needs 32 devices"),
        (("data", "model"), (4,), "size for each"),
        (("data",), (0,), "positive"),
        (("a", "a"), (2, 2), "distinct"),
        (("a",), ("4",), "whole sizes"),
    ],
)
def test_a_mesh_that_does_not_fit(installed, names, shape, words):
    with pytest.raises(rk.RematError, match=words):
        rk.target("tpu:v5e:4x4").mesh(names, shape)


def test_gpu_memory_is_what_the_allocator_takes(installed, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    whole = CHIPS["cuda:h100"].memory_bytes
    assert rk.target("cuda:h100").memory_bytes == int(0.75 * whole)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9")
    assert rk.target("cuda:h100").memory_bytes == int(0.9 * whole)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "much")
    assert rk.target("cuda:h100").memory_bytes == int(0.75 * whole)


@pytest.mark.parametrize("name", CHIPS)
def test_the_table_of_chips(name):
    chip = CHIPS[name]
    assert 2**33 < chip.memory_bytes < 2**38 and 1e11 < chip.bandwidth < 1e13 and 1e10 <= chip.host_bandwidth < 1e11
    assert chip.peak("float16") == chip.peak("bfloat16") >= chip.peak("float32")
    assert chip.peak("int4") == chip.peak("int8") >= chip.peak("float8_e4m3fn") >= chip.peak("bfloat16")
    assert chip.peak("complex64") == chip.peak("float32")
