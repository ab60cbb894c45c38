"""Training on several processes: the same losses as one process, and the same plan in each of them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import distributed_training as training
import numpy as np
import pytest

COUNT = 2
LONGEST = 600  # seconds until a run is given up
ATTEMPTS = 3  # somebody else may take the port in the meantime
TAKEN = ("address already in use", "Failed to bind", "DEADLINE_EXCEEDED", "Connect timeout")


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(number, port, folder):
    environ = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(pathlib.Path(__file__).parent.parent),
    }
    command = [sys.executable, training.__file__, f"localhost:{port}", str(COUNT), str(number), folder / f"{number}"]
    with open(folder / f"{number}.log", "w") as log:
        return subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)


def run(folder):
    """Runs the processes; returns their exit statuses and all that they said. None that is left over survives."""
    folder.mkdir()
    port = free_port()
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(COUNT):
            p = start(number, port, folder)
            stack.callback(p.wait)
            stack.callback(p.kill)
            started.append(p)
        end = time.monotonic() + LONGEST
        while any(p.poll() is None for p in started) and time.monotonic() < end:
            if any(p.poll() for p in started):  # the others would wait for it
                end = min(end, time.monotonic() + 10)
            time.sleep(0.1)
        statuses = [p.poll() for p in started]
    return statuses, "\n".join((folder / f"{n}.log").read_text() for n in range(COUNT))


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each process saw."""
    folder, statuses, said = tmp_path_factory.mktemp("distributed"), [], ""
    for attempt in range(ATTEMPTS):
        statuses, said = run(folder / f"{attempt}")
        if training.NO_GLOO in statuses:
            pytest.skip(f"this jaxlib has no collectives for CPUs: {said.strip().splitlines()[-1]}")
        if not any(statuses) or not any(t.lower() in said.lower() for t in TAKEN):
            break
    assert statuses == [0] * COUNT, f"exit statuses {statuses} (None: no end in {LONGEST} s)\n{said[-4000:]}"
    return [json.loads((folder / f"{attempt}" / f"{n}").read_text()) for n in range(COUNT)]


@pytest.fixture(scope="module")
def losses():
    """The losses of one process, without any remat or sharding."""
    found = training.losses_of(training.loss_of(training.Block), *training.given())
    assert found[-1] < found[0]
    return found


pytestmark = pytest.mark.slow


def test_the_run_is_distributed(seen):
    for process in seen:
        assert process["processes"] == COUNT
        assert process["devices"] == [4, 2]
        assert process["parts"] == 4  # each device holds its own part of a parameter


@pytest.mark.parametrize("way", ["decorated", "applied", "planned"])
def test_losses_are_those_of_one_process(seen, losses, way):
    for process in seen:
        np.testing.assert_allclose(process["losses"][way], losses, rtol=1e-5)
        assert process["kept"][way] < process["kept"]["plain"]


def test_every_process_derives_the_same_plan(seen):
    first, second = (process["plan"] for process in seen)
    assert first == second
    assert first["blocks"] and seen[0]["again"] > 0
