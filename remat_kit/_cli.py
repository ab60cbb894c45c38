"""The command `remat-kit`: the verbs of the package, on programs named on the command line.

Results go to standard output, progress and errors to standard error. Exit status: 0 fine, 1 findings, 2 wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from remat_kit import _cli_options as options
from remat_kit._errors import RematError, RematWarning

if TYPE_CHECKING:
    from rich.console import Console

    from remat_kit._load import Loaded
    from remat_kit._trace.report import Residuals

_BY = ("block", "name", "op", "path", "source", "dtype", "action")
_DEMO_POLICIES = (
    *("none", "dots", "dots_no_batch", "minimal", "minimal_with_context", "save_out_proj", "minimal_offloaded"),
    "full",
)
_DEMO_DETAIL = "dots_no_batch"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments; those of the process by default.

    Returns:
      The exit status.
    """
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may hold what the terminal's encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _warnings_in_one_line():
            status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader (head, less) has gone: stop, as a program killed by SIGPIPE would
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except RematError as e:
        if args.traceback:
            traceback.print_exc()
        print(f"remat-kit: error: {e}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="remat-kit",
        description="What JAX keeps for the backward pass, under which policy, and what it costs.",
        epilog="A PROGRAM is zoo:NAME (a built-in model) or package.module:factory, where factory() returns "
        "(fn, args) or (fn, args, kwargs). Exit status: 0 fine, 1 findings, 2 wrong use.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.set_defaults(run=lambda args: _version(parser, args), traceback=False)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON instead of tables")
    common.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    p = commands.add_parser("residuals", parents=[common], help="what reverse mode keeps, with bytes and costs")
    options.program_options(p)
    options.policy_options(p)
    p.add_argument("--top", type=options.count, metavar="N", help="show the N largest rows of each table")
    shown = p.add_mutually_exclusive_group()
    shown.add_argument("--by", choices=_BY, help="sum the bytes by this instead of listing values")
    shown.add_argument("--diff", metavar="POLICY", help="show what changes when every block has this policy instead")
    p.set_defaults(run=_residuals)

    p = commands.add_parser("measure", parents=[common], help="what XLA makes of a step: memory, cost, does it fit")
    options.program_options(p)
    options.policy_options(p)
    options.target_options(p)
    p.add_argument("--step", action="store_true", help="compile fn as it is (a whole step), not its value and gradient")
    p.add_argument("--against", metavar="POLICY", help="compile under this policy too, to see what the other does")
    p.add_argument("--top", type=options.count, default=10, metavar="N", help="show the N largest buffers at the peak")
    p.set_defaults(run=_measure)

    p = commands.add_parser("compare", parents=[common], help="several policies side by side, compiled")
    options.program_options(p)
    p.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="POLICY",
        help="one of them (repeatable); four presets without it",
    )
    options.target_options(p)
    p.add_argument("--step", action="store_true", help="compile fn as it is (a whole step), not its value and gradient")
    p.add_argument(
        "--budget", type=options.budget, help="peak to keep within: 14GiB, or a share of the memory such as 0.9"
    )
    p.set_defaults(run=_compare)

    p = commands.add_parser("plan", parents=[common], help="the cheapest plan whose compiled peak is within a budget")
    options.program_options(p)
    options.plan_options(p)
    p.add_argument(
        "--budget", type=options.budget, help="peak to keep within: 14GiB, or a share of the memory such as 0.9"
    )
    p.add_argument("--explain", action="store_true", help="say for each value what becomes of it and why")
    p.add_argument("--save", metavar="FILE", help="write the plan as JSON, which --policy takes")
    p.set_defaults(run=_plan)

    p = commands.add_parser("frontier", parents=[common], help="the plans that no other beats on memory and cost")
    options.program_options(p)
    options.plan_options(p)
    p.add_argument("--points", type=options.count, default=12, metavar="N", help="budgets to plan for (12)")
    p.set_defaults(run=_frontier)

    p = commands.add_parser("targets", parents=[common], help="what can be compiled for here, and what is missing")
    p.set_defaults(run=_targets)

    p = commands.add_parser("policies", parents=[common], help="the presets: what each keeps and what it costs")
    p.add_argument("names", nargs="*", metavar="NAME", help="only these, with their whole text form")
    p.set_defaults(run=_policies)
    p = commands.add_parser("doctor", parents=[common], help="versions, devices, limits, what is missing")
    p.set_defaults(run=_doctor)
    p = commands.add_parser("demo", parents=[common], help="the built-in GPT under several presets")
    p.set_defaults(run=_demo)
    return parser


def _version(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if not args.version:
        parser.print_help(sys.stderr)
        return 2
    import remat_kit

    print(f"remat-kit {remat_kit.__version__}")
    return 0


def _residuals(args: argparse.Namespace) -> int:
    from remat_kit._load import load, parse_settings
    from remat_kit._show import text

    policy = options.policy_of(args)
    settings = parse_settings(args.set)
    with _progress(f"making {args.program}"):
        program = load(args.program, settings)
    report = _report(args.program, program, policy, argnums=args.argnums, has_aux=args.has_aux)
    if args.diff is not None:
        other = _report(args.program, program, args.diff, argnums=args.argnums, has_aux=args.has_aux)
        diff = report.diff(other)
        return _show(args, diff.to_dict, lambda console: text.print_diff(diff, console, top=args.top))
    if args.by is not None:
        sums = report.by(args.by)
        data = {"schema": 1, "figures": "predicted", "policy": report.policy, "by": args.by, "bytes": sums}
        return _show(args, lambda: data, lambda console: text.print_sums(args.by, sums, console, top=args.top))
    return _show(args, report.to_dict, lambda console: report.print(console, top=args.top))


def _measure(args: argparse.Namespace) -> int:
    import remat_kit
    from remat_kit._load import load, parse_settings
    from remat_kit._show import measurement

    policy = options.policy_of(args)
    where = remat_kit.target(args.target)
    settings = parse_settings(args.set)
    with _progress(f"making {args.program}"):
        fn, fn_args, kwargs = load(args.program, settings)
    with _progress(f"compiling {args.program} for {where}"), _told(args.program, "measuring"):
        m = remat_kit.measure(
            fn,
            *fn_args,
            policy=policy,
            grad=not args.step,
            against=args.against,
            argnums=args.argnums,
            has_aux=args.has_aux,
            **options.target_settings(args, where),
            **kwargs,
        )
    _show(args, m.to_dict, lambda console: measurement.print_measurement(m, console, top=args.top))
    return 1 if m.fits is False else 0


def _compare(args: argparse.Namespace) -> int:
    import remat_kit
    from remat_kit._load import load, parse_settings

    where = remat_kit.target(args.target)
    settings = parse_settings(args.set)
    with _progress(f"making {args.program}"):
        fn, fn_args, kwargs = load(args.program, settings)
    chosen = {"policies": {text: options.read_policy(text) for text in args.policy}} if args.policy else {}
    with _told(args.program, "comparing"), contextlib.redirect_stdout(sys.stderr):
        c = remat_kit.compare(
            fn,
            *fn_args,
            argnums=args.argnums,
            has_aux=args.has_aux,
            budget=args.budget,
            grad=not args.step,
            **chosen,
            **options.target_settings(args, where),
            **kwargs,
        )
    _show(args, c.to_dict, c.print)
    return 0 if c.best else 1


def _plan(args: argparse.Namespace) -> int:
    import remat_kit
    from remat_kit._show.plan import print_explanation

    plan = _planned(args, remat_kit.plan, "planning", budget=args.budget)
    if args.save is not None:
        plan.save(args.save)
    _show(args, plan.to_dict, lambda console: print_explanation(plan, console) if args.explain else plan.print(console))
    return 0 if plan.within else 1


def _frontier(args: argparse.Namespace) -> int:
    import remat_kit

    found = _planned(args, remat_kit.frontier, "planning", points=args.points)
    return _show(args, found.to_dict, found.print)


def _planned(args: argparse.Namespace, verb: Callable[..., Any], doing: str, **options: Any) -> Any:
    import remat_kit
    from remat_kit._load import load, parse_settings

    where = None if args.target == "none" else remat_kit.target(args.target)
    settings = parse_settings(args.set)
    with _progress(f"making {args.program}"):
        fn, fn_args, kwargs = load(args.program, settings)
    with _told(args.program, doing), contextlib.redirect_stdout(sys.stderr):
        return verb(
            fn,
            *fn_args,
            target=where,
            actions=(*(args.action or ("save", "offload")), "recompute"),
            minimize=args.minimize,
            compiles=args.compiles,
            names_only=args.names_only,
            split=args.split,
            keep_barriers=args.keep_barriers,
            timeout=args.timeout,
            argnums=args.argnums,
            has_aux=args.has_aux,
            **options,
            **kwargs,
        )


def _targets(args: argparse.Namespace) -> int:
    import remat_kit
    from remat_kit._show.targets import print_targets

    found = remat_kit.targets()
    data = {"schema": 1, "targets": [t.to_dict() for t in found]}
    return _show(args, lambda: data, lambda console: print_targets(found, console))


def _report(name: str, program: Loaded, policy: Any, **options: Any) -> Residuals:
    import remat_kit

    fn, args, kwargs = program
    with _progress(f"tracing {name}" + (f" under {policy}" if policy is not None else "")), _told(name, "tracing"):
        return remat_kit.residuals(fn, *args, policy=policy, **options, **kwargs)


@contextlib.contextmanager
def _told(name: str, doing: str) -> Iterator[None]:
    """The program is the user's: what it raises is told, not shown as ours."""
    from remat_kit._load import describe

    try:
        yield
    except RematError:
        raise
    except Exception as e:
        raise RematError(f"{doing} {name} failed: {describe(e)}. --traceback shows more.") from e


def _policies(args: argparse.Namespace) -> int:
    import remat_kit
    from remat_kit._show.presets import print_presets

    names = args.names or list(remat_kit.presets)
    found = [(name, remat_kit.presets[name]) for name in names]  # an unknown one raises UnknownPolicyError
    data = [{"name": name, "doc": str(getattr(p, "doc", "") or ""), "policy": str(p)} for name, p in found]
    whole = bool(args.names)
    return _show(
        args, lambda: {"schema": 1, "policies": data}, lambda console: print_presets(data, console, whole=whole)
    )


def _doctor(args: argparse.Namespace) -> int:
    from remat_kit import _doctor

    with _progress("looking around"):
        facts = _doctor.examine()

    def show(console: Console) -> None:
        from remat_kit._show import doctor

        doctor.print_facts(facts, console)

    _show(args, lambda: facts, show)
    return 1 if facts["problems"] else 0


def _demo(args: argparse.Namespace) -> int:
    from remat_kit._load import load
    from remat_kit._show import text

    with _progress("making zoo:gpt"):
        program = load("zoo:gpt", {})
    reports, refused = {}, {}
    for name in _DEMO_POLICIES:
        try:
            reports[name] = _report("zoo:gpt", program, name)
        except RematError as e:  # such as offloading, where this JAX cannot do it
            refused[name] = str(e)
    if _DEMO_DETAIL not in reports:
        raise RematError(refused[_DEMO_DETAIL])
    detail = reports[_DEMO_DETAIL]

    def show(console: Console) -> None:
        from rich.text import Text

        console.print(Text("What reverse mode keeps of zoo:gpt, by policy (predicted, nothing is allocated)", "bold"))
        text.print_comparison(reports, console)
        for name, reason in refused.items():
            console.print(Text(f"{name} is refused here: {reason}", "yellow"))
        console.print()
        detail.print(console, top=15)
        console.print()
        for line in (
            f"This table again:  remat-kit residuals zoo:gpt --policy {_DEMO_DETAIL}",
            "Your own program:  remat-kit residuals package.module:factory --policy dots",
            "All policies:      remat-kit policies",
        ):
            console.print(Text(line))

    def data() -> Any:
        return {"schema": 1, "reports": {k: r.to_dict() for k, r in reports.items()}, "refused": refused}

    return _show(args, data, show)


def _show(args: argparse.Namespace, data: Callable[[], Any], table: Callable[[Console], None]) -> int:
    if args.json:
        print(json.dumps(data(), indent=2))
    else:
        from rich.console import Console

        # a pipe has no width: COLUMNS says it, else a line that fits an editor
        width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 100
        table(Console(width=width))
    return 0


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """Says on a terminal's standard error what is going on, and takes it away again.

    What the user's program prints meanwhile goes to standard error: standard output is for the result.
    """
    if not sys.stderr.isatty():
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(f"{what} ...")), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        place = "" if issubclass(category, RematWarning) else f"{filename}:{lineno}: {category.__name__}: "
        print(f"remat-kit: warning: {place}{message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
