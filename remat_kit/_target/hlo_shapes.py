"""Shapes of XLA's text form, and the bytes that they take in memory.

Tiled layouts of TPUs are padded to their tiles, as XLA pads them. Pointer tables of tuples are not counted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

DEVICE = 0  # memory spaces, as XLA numbers them: main memory
VMEM = 1  # on-chip memory of a TPU
HOST = 5

_WIDTH = re.compile(r"[a-z]+?(\d+)")
_NO_BYTES = ("token", "opaque")
_DEEPEST = 64  # no real program nests tuples this deep
_LEAF = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\})?")
_PIECE = re.compile(rf"/\*.*?\*/|[()]|{_LEAF.pattern}|token|opaque\b")
_TILE = re.compile(r"\(([^()]*)\)")
_TILES = re.compile(r"T((?:\([^()]*\))+)")
_SPACE = re.compile(r"S\((\d{1,9})\)")
_ELEMENT = re.compile(r"E\((\d{1,4})\)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array, or a tuple of shapes.

    Attributes:
      dtype: XLA's name, ``"bf16"``; empty for a tuple.
      dims: the logical dimensions; the bound of a dynamic one.
      layout: dimension numbers, the fastest varying first.
      tiles: the tiles of the layout, outermost first; ``-1`` stands for a dimension joined with the next.
      space: memory space: `DEVICE`, `VMEM`, `HOST` or another small memory of the chip.
      bits: of one element in memory.
      parts: the elements of a tuple; None for an array.
    """

    dtype: str = ""
    dims: tuple[int, ...] = ()
    layout: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    space: int = DEVICE
    bits: int = 0
    parts: tuple[Shape, ...] | None = None

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes with the padding of the tiles; of a tuple, over all its elements, whatever their memory."""
        if self.parts is not None:
            return sum(p.nbytes for p in self.parts)
        physical = [self.dims[i] for i in reversed(self.layout)] if self.layout else list(self.dims)
        return -(-math.prod(_padded(physical, self.tiles)) * self.bits // 8)

    @property
    def size(self) -> int:
        """Number of elements, without padding; of a tuple, over all its elements."""
        return math.prod(self.dims) if self.parts is None else sum(p.size for p in self.parts)

    @functools.cached_property
    def arrays(self) -> tuple[tuple[tuple[int, ...], Shape], ...]:
        """The arrays in it, each with its index in nested tuples; ``((), self)`` for an array."""
        return tuple(_arrays(self))

    def at(self, index: tuple[int, ...]) -> Shape | None:
        """The shape at an index in nested tuples; None where there is none."""
        found = self
        for i in index:
            if found.parts is None or not 0 <= i < len(found.parts):
                return None
            found = found.parts[i]
        return found

    def __str__(self) -> str:
        if self.parts is not None:
            return "(" + ", ".join(map(str, self.parts)) + ")"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]" if self.dtype not in _NO_BYTES else self.dtype


def _arrays(shape: Shape) -> Iterator[tuple[tuple[int, ...], Shape]]:
    if shape.parts is None:
        yield (), shape
    for i, part in enumerate(shape.parts or ()):
        for index, leaf in part.arrays:
            yield (i, *index), leaf


def _padded(dims: list[int], tiles: tuple[tuple[int, ...], ...]) -> list[int]:
    """Dimensions, the slowest first, cut into tiles: each tile splits the fastest ones into count and tile."""
    for tile in tiles:
        sizes = list(tile)
        while -1 in sizes:  # joined with the next faster dimension
            i = sizes.index(-1)
            del sizes[i]
            near = len(dims) - (len(sizes) - i)
            if near >= 1:
                dims = [*dims[: near - 1], dims[near - 1] * dims[near] if near < len(dims) else dims[near - 1]]
        dims = [1] * (len(sizes) - len(dims)) + dims
        outer = len(dims) - len(sizes)
        counts = [-(-d // max(t, 1)) for d, t in zip(dims[outer:], sizes, strict=True)]
        dims = [*dims[:outer], *counts, *sizes]
    return dims


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d{1,18}", text))


def _bits(dtype: str) -> int:
    """Bits of an element that is not packed: sub-byte types take a byte each unless the layout says `E`."""
    if dtype == "pred":
        return 8
    width = _WIDTH.match(dtype)
    return max(8, int(width[1][:4])) if width else 0


@functools.lru_cache(maxsize=4096)
def _array(dtype: str, dims: str, layout: str) -> Shape:
    order, _, rest = layout.partition(":")
    tiles = _TILES.search(rest)
    sizes = tuple(tuple(-1 if n.strip() == "*" else int(n) for n in t.split(",") if _is_size(n))
                  for t in _TILE.findall(tiles[1])) if tiles else ()  # fmt: skip
    space, element = _SPACE.search(rest), _ELEMENT.search(rest)
    shape = _numbers(dims)
    minor = _numbers(order)
    return Shape(
        dtype,
        shape,
        minor if sorted(minor) == list(range(len(shape))) else (),
        tuple(t for t in sizes if t),
        int(space[1]) if space else DEVICE,
        0 if dtype in _NO_BYTES else int(element[1]) if element else _bits(dtype),
    )


def _is_size(text: str) -> bool:
    text = text.strip()
    return text == "*" or (text.isascii() and text.isdecimal() and len(text) < 19)


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Shape:
    """Reads a shape, ``"(bf16[8,128]{1,0:T(8,128)(2,1)}, s32[])"``; what cannot be read has no bytes."""
    stack: list[list[Shape]] = [[]]
    for piece in _PIECE.finditer(text):
        word = piece[0]
        if word == "(":
            if len(stack) > _DEEPEST:
                return Shape(parts=())
            stack.append([])
        elif word == ")":
            if len(stack) > 1:
                done = Shape(parts=tuple(stack.pop()))
                stack[-1].append(done)
        elif piece[1]:
            stack[-1].append(_array(piece[1], piece[2], piece[3] or ""))
        elif word in _NO_BYTES:
            stack[-1].append(Shape(word))
    while len(stack) > 1:
        done = Shape(parts=tuple(stack.pop()))
        stack[-1].append(done)
    return stack[0][0] if stack[0] else Shape(parts=())
