"""remat_kit: rematerialization for JAX. Trace, choose, apply, verify."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jax.ad_checkpoint import checkpoint_name as checkpoint_name

from remat_kit._apply import apply as apply
from remat_kit._errors import RematError as RematError
from remat_kit._errors import RematWarning as RematWarning
from remat_kit._errors import UnknownPolicyError as UnknownPolicyError
from remat_kit._every import every as every
from remat_kit._loops.scan import scan as scan
from remat_kit._loops.sequential import sequential as sequential
from remat_kit._loops.while_loop import while_loop as while_loop
from remat_kit._override import override as override
from remat_kit._plan.frontier import Frontier as Frontier
from remat_kit._plan.frontier import frontier as frontier
from remat_kit._plan.max_batch import MaxBatch as MaxBatch
from remat_kit._plan.max_batch import max_batch as max_batch
from remat_kit._plan.plan import Plan as Plan
from remat_kit._plan.plan import PlannedBlock as PlannedBlock
from remat_kit._plan.plan import PlannedValue as PlannedValue
from remat_kit._plan.planner import plan as plan
from remat_kit._policy import Action as Action
from remat_kit._policy import Policy as Policy
from remat_kit._policy import Rule as Rule
from remat_kit._policy import Selector as Selector
from remat_kit._policy import offload as offload
from remat_kit._policy import policy as policy
from remat_kit._policy import recompute as recompute
from remat_kit._policy import save as save
from remat_kit._presets import presets as presets
from remat_kit._presets import register as register
from remat_kit._reports import residuals as residuals
from remat_kit._reports import trace as trace
from remat_kit._target.compare import compare as compare
from remat_kit._target.comparison import Comparison as Comparison
from remat_kit._target.comparison import ComparisonRow as ComparisonRow
from remat_kit._target.measure import measure as measure
from remat_kit._target.measurement import Effect as Effect
from remat_kit._target.measurement import Held as Held
from remat_kit._target.measurement import Measurement as Measurement
from remat_kit._target.measurement import Timing as Timing
from remat_kit._target.target import Target as Target
from remat_kit._target.target import TargetInfo as TargetInfo
from remat_kit._target.target import target as target
from remat_kit._target.target import targets as targets
from remat_kit._trace.program import Block as Block
from remat_kit._trace.program import Program as Program
from remat_kit._trace.program import Value as Value
from remat_kit._trace.report import Residual as Residual
from remat_kit._trace.report import Residuals as Residuals
from remat_kit._trace.report import ResidualsDiff as ResidualsDiff
from remat_kit._verify.check import check as check
from remat_kit._verify.finding import Finding as Finding
from remat_kit._verify.finding import Findings as Findings
from remat_kit._verify.lint import lint as lint
from remat_kit._verify.result import Check as Check
from remat_kit._verify.result import CheckError as CheckError
from remat_kit._verify.result import Compared as Compared
from remat_kit._verify.result import Derivative as Derivative
from remat_kit._wrap import checkpoint as checkpoint
from remat_kit._wrap import remat as remat

if TYPE_CHECKING:
    from remat_kit import linen as linen
    from remat_kit import nnx as nnx
    from remat_kit import testing as testing
    from remat_kit import zoo as zoo

__version__ = "0.1.0"

_LAZY = ("linen", "nnx", "testing", "zoo")  # loaded when used; all but testing load Flax


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"remat_kit.{name}")
    raise AttributeError(f"module 'remat_kit' has no attribute {name!r}")


def __dir__() -> list[str]:
    public = {name for name in globals() if not name.startswith("_")}
    return sorted((public | {*_LAZY, "__version__"}) - {"annotations", "importlib", "Any", "TYPE_CHECKING"})
