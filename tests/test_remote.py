"""The compiler's own process: what happens when it dies, hangs or is interrupted."""

import os
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

import remat_kit as rk
from remat_kit._target import cache, compile, remote
from tests.by_hand import SMALL

pytestmark = pytest.mark.tpu


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("REMAT_KIT_CACHE", "off")


def small():
    return rk.measure(lambda x: jnp.sum(jnp.sin(x) ** 2), jax.ShapeDtypeStruct((64, 64), jnp.float32), target="tpu:v5e")


def large(timeout=600):
    fn, args = rk.zoo.gpt(**{**SMALL, "layers": 8}, abstract=True)
    return rk.measure(fn, *args, policy="dots", target="tpu:v5e", timeout=timeout)


def worker():
    return remote._workers["tpu"]


@pytest.fixture
def while_compiling(monkeypatch):
    """Does something a second after the next program has gone to the compiler."""

    def arm(action):
        ask = remote.Worker.ask

        def asked(self, *args):
            monkeypatch.setattr(remote.Worker, "ask", ask)
            threading.Timer(1.0, action).start()
            return ask(self, *args)

        monkeypatch.setattr(remote.Worker, "ask", asked)

    return arm


def test_one_process_serves_many_compiles():
    small()
    first = worker().process.pid
    small()
    assert worker().process.pid == first != os.getpid()


@pytest.mark.parametrize("number, words", [(signal.SIGKILL, "killed .signal 9.*memory"), (signal.SIGABRT, "crashed")])
def test_a_compiler_that_dies_is_an_error_and_the_next_call_works(while_compiling, number, words):
    small()
    while_compiling(lambda: os.kill(worker().process.pid, number))
    with pytest.raises(rk.RematError, match=words):
        large()
    assert small().peak_bytes > 0


def test_a_compiler_that_dies_between_two_calls():
    small()
    worker().process.kill()
    worker().process.wait()
    assert small().peak_bytes > 0


def test_a_compiler_that_takes_too_long():
    small()
    with pytest.raises(rk.RematError, match="longer than 0.2 s.*timeout="):
        large(timeout=0.2)
    assert not worker().alive and small().peak_bytes > 0


def test_a_compiler_that_hangs():
    small()
    os.kill(worker().process.pid, signal.SIGSTOP)  # it neither reads nor answers
    with pytest.raises(rk.RematError, match="longer than 2 s"):
        large(timeout=2)
    assert small().peak_bytes > 0


def test_other_flags_are_for_another_compiler(monkeypatch):
    small()
    first = worker().process.pid
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=16384")
    small()
    assert worker().process.pid != first


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns of its threads; the child here uses none of them
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_forked_child_has_a_compiler_of_its_own():
    small()
    first = worker().process.pid
    child = os.fork()
    if not child:
        os._exit(0 if not remote._workers and all(lock.acquire(False) for lock in remote._locks.values()) else 1)
    assert os.waitpid(child, 0)[1] == 0 and worker().alive and worker().process.pid == first


def test_an_interrupt_ends_the_compiler_too(while_compiling):
    small()
    while_compiling(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        large()
    assert not worker().alive and small().peak_bytes > 0


def test_several_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(small().peak_bytes)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 3 and len(set(found)) == 1


def test_what_the_compiler_refuses_is_told():
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(rk.RematError, match="XLA cannot compile .*xla_no_such_option"):
        rk.measure(jnp.sum, x, target="tpu:v5e", compiler_options={"xla_no_such_option": True})


def test_stderr_stays_clean_and_the_process_ends_with_its_parent():
    program = (
        "import jax, jax.numpy as jnp; jax.devices(); print(jnp.ones(3).sum());"  # a notebook whose JAX is in use
        "import remat_kit as rk; from remat_kit._target import remote; import os;"
        "m = rk.measure(lambda x: (jnp.sin(x)**2).sum(), jnp.ones((64, 64)), target='tpu:v5e');"
        "print(m.peak_bytes, remote._workers['tpu'].process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # JAX's CUDA plugin, where installed, says that it found no driver
    assert not [s for s in done.stderr.splitlines() if "cudart" not in s and "InitializeLog" not in s]
    pid = int(done.stdout.split()[-1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_files_in_the_way_of_the_standard_library(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('not json')")
    code = "import json, sys; sys.path.append({!r}); sys.path.append({!r}); import remat_kit as rk, jax.numpy as jnp;"
    code += "print(rk.measure(lambda x: (jnp.sin(x)**2).sum(), jnp.ones((64, 64)), target='tpu:v5e').peak_bytes)"
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run(
        [sys.executable, "-P", "-c", code.format(str(tmp_path), here)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr


def test_a_cache_of_strangers(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_KIT_CACHE", str(tmp_path))
    first = small()
    (path,) = tmp_path.glob("*.json.gz")
    for content in (b"", b"nonsense", path.read_bytes()[:-20]):
        path.write_bytes(content)
        again = small()
        assert not again.cached and again.peak_bytes == first.peak_bytes
    assert small().cached
    cache.store(path.name.split(".")[0], {"memory": {"x": "many"}, "cost": 3, "text": None, "seconds": [], "oom": 1})
    assert compile._read(cache.load(path.name.split(".")[0]), "") is None and not small().cached
