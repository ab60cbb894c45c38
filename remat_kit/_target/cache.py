"""What was compiled before: XLA's figures by the program they are of, on disk, so that asking again is instant.

A folder of compressed JSON files, ``~/.cache/remat-kit/compile`` (XDG_CACHE_HOME is honoured); REMAT_KIT_CACHE names
another, or ``off``. Nothing in it is trusted: a file that does not read as one of ours counts as missing.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

SCHEMA = 1
_FILES, _BYTES = 512, 256 * 2**20
_LARGEST = 512 * 2**20  # of one file, uncompressed


def folder() -> Path | None:
    """Where the cache lies; None where it is off."""
    chosen = os.environ.get("REMAT_KIT_CACHE", "")
    if chosen.lower() == "off":
        return None
    try:
        if chosen:
            return Path(chosen).expanduser()
        base = os.environ.get("XDG_CACHE_HOME", "")
        return Path(base or Path.home() / ".cache") / "remat-kit" / "compile"
    except RuntimeError:  # nobody's home
        return None


def key(*parts: str | bytes) -> str:
    """A name for what was compiled: a digest of everything that the result depends on."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def load(name: str) -> dict[str, Any] | None:
    """What was stored under a key, or None."""
    where = folder()
    if where is None:
        return None
    path = where / f"{name}.json.gz"
    try:
        with gzip.open(path) as f:
            text = f.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            return None
        data = json.loads(text)
        os.utime(path)
    except (OSError, ValueError, EOFError, zlib.error, RecursionError):
        return None
    return data if isinstance(data, dict) and data.get("schema") == SCHEMA else None


def store(name: str, data: dict[str, Any]) -> None:
    """Stores JSON data under a key. A folder that cannot be written is no error: it only costs a compile."""
    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=where)
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(gzip.compress(json.dumps({"schema": SCHEMA, **data}).encode(), 5))
            os.replace(temporary, where / f"{name}.json.gz")
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # a disk that is full
        _evict(where)


def _evict(where: Path) -> None:
    """Removes the files used longest ago, until the rest is few and small enough."""
    files = []
    for path in where.iterdir():
        with contextlib.suppress(OSError):  # another process was quicker
            stat = path.stat()
            files.append((stat.st_mtime, stat.st_size, path))
    size = 0
    for number, (_, n, path) in enumerate(sorted(files, reverse=True)):
        size += n
        if number >= _FILES or size > _BYTES:
            with contextlib.suppress(OSError):
                path.unlink()
