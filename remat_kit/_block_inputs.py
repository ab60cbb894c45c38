"""What a block is handed by the blocks before it, under a name that policies can ask for: ``offload name=block_input``.

A `jax.checkpoint` region keeps its inputs on the device, whatever its policy says. Named inside the region, an input is
a value like any other, and only the copy that the policy makes of it is kept.
"""

from __future__ import annotations

from typing import Any

from remat_kit._policy import Policy
from remat_kit._trace import jaxprs
from remat_kit._trace.blocks import Candidate
from remat_kit._trace.jaxprs import Var

INPUT = "block_input"


def asked(policy: Policy) -> bool:
    """Whether a policy names block inputs. A glob that happens to match does not."""
    return any(INPUT in rule.selector.name for rule in policy.rules)


def named(block: Candidate, jaxpr: Any, policy: Policy) -> Any:
    """The program of a block, closed, with its inputs named if a policy asks for it.

    Inputs are the arrays that the program around it has computed: the carry of a scan, but neither what the scan takes
    slices of nor what every iteration reads, and no arguments of the whole program (parameters, data).
    """
    if not asked(policy):
        return jaxpr
    owner = jaxprs.opened(jaxpr)
    eqns, names = [], {}
    for v, computed in zip(owner.invars, _computed(block, owner), strict=True):
        if computed and jaxprs.is_inexact(v.aval) and v.aval.shape:
            (eqn,) = jaxprs.opened(jaxprs.trace(lambda x: [jaxprs.named(x, INPUT)], [v.aval])).eqns
            eqns.append(eqn.replace(invars=[v]))
            names[v] = eqn.outvars[0]
    for e in owner.eqns:
        read = [names.get(v, v) if isinstance(v, Var) else v for v in e.invars]
        eqns.append(e.replace(invars=read) if read != list(e.invars) else e)
    return jaxprs.replace_eqns(jaxpr, eqns)


def _computed(block: Candidate, program: Any) -> list[bool]:
    """For each input of a block's program whether the program around it has computed it."""
    made = {v for e in block.owner.eqns for v in e.outvars}
    if block.kind not in ("scan", "checkpoint"):
        return [v in made for v in program.invars]
    eqn = block.owner.eqns[block.eqns[0]]
    (call,) = jaxprs.calls(eqn)
    if block.kind == "scan":
        carried = range(call.num_consts, call.num_consts + call.num_carry)
        return [i in carried for i in range(len(program.invars))]
    return [isinstance(v := eqn.invars[o], Var) and v in made for o in call.operands]
