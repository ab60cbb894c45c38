"""Finding blocks: the regions of a program that can be rematerialized as one unit, and which to take.

Candidates are module calls and marked functions (groups of equations under one mark), scan bodies and
existing `jax.checkpoint` regions; where a program has none, segments between its narrow places.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from remat_kit._trace import cost, jaxprs, marks, narrow
from remat_kit._trace.holders import Holders
from remat_kit._trace.jaxprs import CallKind, JaxprEqn, Var

KINDS = ("module", "scan", "checkpoint", "segment", "whole", "rest")
REST = "rest_"  # how the paths of the parts between blocks begin
Site = tuple[tuple[int, tuple[str, int | None]], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A region that can be made a block.

    Attributes:
      kind: "module" (a module call or marked function), "scan" (its body), "checkpoint" (an existing
        region), "segment", "whole", or "rest" (a part between blocks).
      path: its name, unique in the program.
      site: the program it stands in: from the root, the index of each equation and the key of its call.
      outer: the equations of `site`.
      owner: that program (open).
      eqns: indices of its equations there; for a scan or a region the one equation.
      marks: how many of the marks on its equations lead to it.
      trips: how many times it runs for each run of `owner`: the length of a scan.
      runs: how many times it runs in all, loops around it included.
      parent: the candidate around it.
      span: for a part of a scan the first of its iterations and the one behind the last; None for the whole.
    """

    kind: str
    path: str
    site: Site
    outer: tuple[JaxprEqn, ...]
    owner: Any
    eqns: tuple[int, ...]
    marks: int = 0
    trips: int = 1
    runs: int = 1
    parent: Candidate | None = None
    span: tuple[int, int] | None = None

    @functools.cached_property
    def depth(self) -> int:
        return sum(1 for _ in self.ancestors())

    def ancestors(self) -> Iterable[Candidate]:
        above = self.parent
        while above is not None:
            yield above
            above = above.parent

    @functools.cached_property
    def members(self) -> frozenset[int]:
        """Identities of its equations."""
        return frozenset(id(self.owner.eqns[i]) for i in self.eqns)

    def holds(self, chain: Sequence[JaxprEqn]) -> bool:
        """Whether an equation lies in this region, given it and the calls around it, outermost first."""
        n = len(self.outer)
        if len(chain) <= n or any(a is not b for a, b in zip(chain, self.outer, strict=False)):
            return False
        return id(chain[n]) in self.members


def find(jaxpr: Any) -> list[Candidate]:
    """All candidates of a closed program, outer ones before those inside them."""
    finder = _Finder()
    finder.visit(_Where(jaxprs.opened(jaxpr)), (), None, False)
    return finder.found


class _Finder:
    """Visits a program and the programs nested in it, collecting candidates."""

    def __init__(self) -> None:
        self.found: list[Candidate] = []
        self.used: dict[str, int] = {}

    def visit(
        self, where: _Where, prefix: tuple[str, ...], parent: Candidate | None, taken: bool, own: str = ""
    ) -> None:
        """Visits one program.

        Args:
          taken: whether the candidate around it bears the path `prefix` already.
          own: the name of the one call that the program is, where `prefix` ends with it.
        """
        skipped = int(bool(own) and any(marks.split(jaxprs.scopes(e))[0] for e in where.owner.eqns))
        self.group(where, range(len(where.owner.eqns)), skipped, prefix, parent, taken, "" if skipped else own)

    def group(
        self,
        where: _Where,
        indices: Iterable[int],
        depth: int,
        prefix: tuple[str, ...],
        parent: Candidate | None,
        taken: bool,
        own: str = "",
    ) -> None:
        """Visits equations of one program that share their first `depth` marks."""
        eqns = where.owner.eqns
        marked: dict[str, list[int]] = {}
        order: list[int | str] = []
        for i in indices:
            called, _ = marks.split(jaxprs.scopes(eqns[i]))
            if len(called) <= depth:
                order.append(i)
                continue
            if called[depth] not in marked:
                order.append(called[depth])
            marked.setdefault(called[depth], []).append(i)
        sole = sum(isinstance(x, int) and _is_block_eqn(eqns[x]) for x in order) == 1 and not taken
        for item in order:
            if isinstance(item, int):
                self.eqn(where, item, depth, prefix, parent, sole, own)
                continue
            members = tuple(marked[item])
            path = (*prefix, marks.name(item))
            if self._is_one_block_eqn(eqns, members, depth + 1):
                self.group(where, members, depth + 1, path, parent, False)
            elif _reads_outside(where.owner, members):
                c = self._add("module", path, where, members, depth + 1, 1, parent)
                self.group(where, members, depth + 1, tuple(c.path.split("/")), c, True)

    def eqn(
        self, where: _Where, i: int, depth: int, prefix: tuple[str, ...], parent: Candidate | None, sole: bool, own: str
    ) -> None:
        """Visits the programs nested in one equation; a scan's body and a region are candidates themselves."""
        eqn = where.owner.eqns[i]
        for call in jaxprs.calls(eqn):
            if not call.rewritable or call.key[0] == "cond_jaxpr":
                continue
            inside, path, taken, inner = parent, prefix, False, own
            if call.kind in (CallKind.SCAN, CallKind.REMAT):
                kind = "scan" if call.kind is CallKind.SCAN else "checkpoint"
                scopes = "/".join(marks.split(jaxprs.scopes(eqn))[1])
                if not own and not (sole and prefix):
                    inner = _only_mark(call.jaxpr)
                    path = (*prefix, inner or scopes or kind)
                inside = self._add(kind, path, where, (i,), depth, call.trips, parent)
                path, taken = tuple(inside.path.split("/")), True
            self.visit(where.into(i, call), path, inside, taken, inner)

    def _is_one_block_eqn(self, eqns: Sequence[JaxprEqn], members: Sequence[int], depth: int) -> bool:
        """Whether a marked call is no more than one scan or region (and trifles), which then bears its path."""
        if any(len(marks.split(jaxprs.scopes(eqns[i]))[0]) > depth for i in members):
            return False
        rest = sum(cost.eqn_flops(eqns[i]) for i in members if not _is_block_eqn(eqns[i]))
        inside = [cost.eqn_flops(eqns[i]) for i in members if _is_block_eqn(eqns[i])]
        return len(inside) == 1 and 20 * rest <= inside[0]

    def _add(
        self,
        kind: str,
        path: tuple[str, ...],
        where: _Where,
        eqns: tuple[int, ...],
        depth: int,
        trips: int,
        parent: Any,
    ) -> Candidate:
        text = "/".join(path)
        if parent is None or parent.path != text:  # a region that fills the body of a scan shares its path
            self.used[text] = k = self.used.get(text, 0) + 1
            text = text if k == 1 else f"{text}#{k}"
        c = Candidate(kind, text, where.site, where.outer, where.owner, eqns, depth, trips, where.runs * trips, parent)
        self.found.append(c)
        return c


@dataclasses.dataclass(frozen=True, eq=False)
class _Where:
    """The program being visited and the way to it."""

    owner: Any
    site: Site = ()
    outer: tuple[JaxprEqn, ...] = ()
    runs: int = 1

    def into(self, i: int, call: jaxprs.Call) -> _Where:
        eqn = self.owner.eqns[i]
        return _Where(
            jaxprs.opened(call.jaxpr), (*self.site, (i, call.key)), (*self.outer, eqn), self.runs * call.trips
        )


def _is_block_eqn(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" or jaxprs.remat_region(eqn) is not None


def _only_mark(jaxpr: Any) -> str:
    """The name of the one call that a whole program is, if it is one (a scanned layer); else the empty string."""
    names: list[str] = []
    for e in jaxprs.opened(jaxpr).eqns:
        called, _ = marks.split(jaxprs.scopes(e))
        nested = [c.jaxpr for c in jaxprs.calls(e) if c.kind in (CallKind.REMAT, CallKind.JIT)]
        names.append(marks.name(called[0]) if called else _only_mark(nested[0]) if nested else "")
    first = {n for n in names if n}
    return first.pop() if len(first) == 1 and 2 * sum(map(bool, names)) > len(names) else ""


def _reads_outside(owner: Any, members: Sequence[int]) -> bool:
    """Whether equations read any value: constants that Flax hoists out of a scanned layer are no call of it."""
    made = {v for i in members for v in owner.eqns[i].outvars}
    read = {v for i in members for v in owner.eqns[i].invars if isinstance(v, Var)}
    return bool(read - made - set(owner.constvars))


# Choosing -----------------------------------------------------------------------------------------


def choose(
    jaxpr: Any, candidates: Sequence[Candidate], kept: Sequence[tuple[Sequence[JaxprEqn], int]]
) -> list[Candidate]:
    """Chooses the blocks of a program whose user names none.

    The outermost repeated level (layers) that holds most of the residual bytes, or, where none holds half of them,
    the one that holds most if that is a tenth, or if nothing but the whole program is left; else existing
    regions; else segments between narrow places.

    Args:
      kept: for each residual of the program without any remat, the original equation it comes from with the
        calls around it, and its bytes.
    """
    total = sum(b for _, b in kept)
    held = held_bytes(candidates, kept)
    by_depth: dict[int, list[Candidate]] = {}
    for c in candidates:
        by_depth.setdefault(c.depth, []).append(c)
    levels = [[c for c in _repeated(by_depth[d]) if held[id(c)]] for d in sorted(by_depth)]
    sums = [sum(held[id(c)] for c in level) for level in levels]
    most = next((i for i, n in enumerate(sums) if n and 2 * n >= total), None)
    if most is None and sums and 10 * max(sums) >= total > 0:
        most = sums.index(max(sums))
    if most is not None and levels[most]:
        return levels[most]
    cut = [c for c in candidates if c.kind == "checkpoint" and c.depth == 0] or segments(jaxpr)
    if len(cut) == 1 and sums and max(sums):  # a whole program as one block saves less than any layers
        return levels[sums.index(max(sums))]
    return cut


def held_bytes(candidates: Sequence[Candidate], kept: Sequence[tuple[Sequence[JaxprEqn], int]]) -> dict[int, int]:
    """For each candidate, by identity, the bytes of the residuals that it holds; see `choose`."""
    held = dict.fromkeys(map(id, candidates), 0)
    holders = Holders(candidates)
    for chain, size in kept:
        for c in holders.of(chain):
            held[id(c)] += size
    return held


def _repeated(siblings: Sequence[Candidate]) -> list[Candidate]:
    """Those of one depth that repeat: by a loop, by their path but for numbers, or by being built alike.

    Existing `jax.checkpoint` regions count as alike: somebody has chosen them.
    """
    by_path: dict[Any, list[Candidate]] = {}
    by_form: dict[Any, list[Candidate]] = {}
    for c in siblings:
        around = None if c.parent is None else id(c.parent)
        form = () if c.kind == "checkpoint" else tuple(c.owner.eqns[i].primitive.name for i in c.eqns)
        by_path.setdefault((around, c.kind, _pattern(c.path)), []).append(c)
        by_form.setdefault((around, c.kind, form), []).append(c)
    groups = [g for g in by_path.values() if sum(c.trips for c in g) > 1]
    groups += [g for g in by_form.values() if len(g) > (1 if g[0].kind == "checkpoint" else 2)]
    repeated = {id(c) for g in groups for c in g}
    return [c for c in siblings if id(c) in repeated]


def alike(chosen: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that were not chosen and bear the paths of chosen ones but for numbers."""

    def key(c: Candidate) -> tuple[Any, ...]:
        return c.site, c.kind, _pattern(c.path)

    taken = {c.path for c in chosen}
    patterns = {key(c) for c in chosen if c.span is None}
    return [c for c in candidates if c.path not in taken and key(c) in patterns]


def _pattern(path: str) -> str:
    """A path without its numbers: layers of one kind have one pattern."""
    return re.sub(r"\d+", "{}", re.sub(r"#\d+", "", path))


def segments(jaxpr: Any) -> list[Candidate]:
    """Cuts a program without layers at its narrow places.

    It is one block, the whole of it, where cutting gains nothing or there is little to cut: fewer than four matrix
    products, or without any, of the operations that cost most.
    """
    owner = jaxprs.opened(jaxpr)
    site: Site = ()
    outer: tuple[JaxprEqn, ...] = ()
    while len(owner.eqns) == 1 and (inner := jaxprs.calls(owner.eqns[0])) and inner[0].kind is CallKind.JIT:
        site, outer = (*site, (0, inner[0].key)), (*outer, owner.eqns[0])
        owner = jaxprs.opened(inner[0].jaxpr)
    n = len(owner.eqns)
    flops = [cost.eqn_flops(e) for e in owner.eqns]
    heavy = sum(map(cost.is_matmul, owner.eqns)) or sum(f * 5 >= max(flops, default=0) > 0 for f in flops)
    cuts = narrow.cuts(owner) if heavy >= _LITTLE else []
    if not cuts:
        return [Candidate("whole", "whole", site, outer, owner, tuple(range(n)))] if n else []
    return [
        Candidate("segment", f"segment_{k}", site, outer, owner, tuple(range(a, b)))
        for k, (a, b) in enumerate(itertools.pairwise([0, *cuts, n]))
    ]


_LITTLE = 4


def part_path(path: str, first: int, last: int) -> str:
    """The path of a part of a scan: ``layers@0:4``, its iterations from the first to before the last."""
    return f"{path}@{first}:{last}"


def split_part(path: str) -> tuple[str, tuple[int, int | None] | None]:
    """The path of a scan in that of a part of it, and the part; either end may be left out of ``layers@4:``."""
    found = re.fullmatch(r"(.+)@(\d*):(\d*)", path)
    if found is None:
        return path, None
    return found[1], (int(found[2] or 0), int(found[3]) if found[3] else None)


def part_of(c: Candidate, part: tuple[int, int | None]) -> Candidate | None:
    """A part of a scan, or of a part of one; None if that has no such iterations."""
    begin, path = (0, c.path) if c.span is None else (c.span[0], split_part(c.path)[0])
    end = begin + c.trips
    first, last = part[0], end if part[1] is None else part[1]
    if c.kind != "scan" or not begin <= first < last <= end:
        return None
    n = last - first
    return dataclasses.replace(
        c, path=part_path(path, first, last), trips=n, runs=c.runs // c.trips * n, span=(first, last)
    )


def rest(chosen: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[Candidate]:
    """The parts of a program before, between and behind chosen blocks that stand side by side: ``rest_0``, ...

    Where blocks stand in several programs, the parts of the outermost one.
    """
    if not chosen or any(c.kind in ("segment", "whole") for c in chosen):
        return []
    site = min((c.site for c in chosen), key=len)
    owner, outer = next((c.owner, c.outer) for c in chosen if c.site == site)
    taken: set[int] = set()
    for c in chosen:
        if c.site[: len(site)] != site:
            return []
        mine = c.eqns if c.site == site else (c.site[len(site)][0],)
        taken |= set(range(min(mine), max(mine) + 1))
    uncut = narrow.refs_alive(owner)
    found: list[tuple[int, ...]] = []
    run: list[int] = []
    for i in range(len(owner.eqns) + 1):
        if i < len(owner.eqns) and i not in taken:
            run.append(i)
            continue
        if run and run[0] not in uncut and i not in uncut:
            found.append(tuple(run))
        run = []
    taken_paths = {c.path for c in candidates}
    paths = (path for k in itertools.count() if (path := f"{REST}{k}") not in taken_paths)
    return [Candidate("rest", next(paths), site, outer, owner, eqns) for eqns in found]
