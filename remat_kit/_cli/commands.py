"""The commands: each calls a verb of the package on a program and shows what it returns."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from remat_kit._cli import options
from remat_kit._cli.output import present, progress, save_plot, show, told, write_files
from remat_kit._errors import RematError

if TYPE_CHECKING:
    from rich.console import Console

    from remat_kit._load import Loaded
    from remat_kit._trace.report import Residuals

_DEMO_POLICIES = (
    *("none", "dots", "dots_no_batch", "minimal", "minimal_with_context", "save_out_proj", "minimal_offloaded"),
    "full",
)
_DEMO_DETAIL = "dots_no_batch"


def residuals(args: argparse.Namespace) -> int:
    """What reverse mode keeps."""
    from remat_kit._load import load, parse_settings
    from remat_kit._show import text

    policy = options.policy_of(args)
    settings = parse_settings(args.set)
    with progress(f"making {args.program}"):
        program = load(args.program, settings)
    report = _report(args.program, program, policy, argnums=args.argnums, has_aux=args.has_aux)
    if args.diff is not None:
        other = _report(args.program, program, args.diff, argnums=args.argnums, has_aux=args.has_aux)
        diff = report.diff(other)
        return present(args, diff, lambda console: text.print_diff(diff, console, top=args.top))
    if args.by is not None:
        sums = report.by(args.by)
        write_files(args, report)
        data = {"schema": 1, "figures": "predicted", "policy": report.policy, "by": args.by, "bytes": sums}
        return show(args, lambda: data, lambda console: text.print_sums(args.by, sums, console, top=args.top))
    return present(args, report, lambda console: report.print(console, top=args.top))


def measure(args: argparse.Namespace) -> int:
    """What XLA makes of a step."""
    import remat_kit
    from remat_kit._load import load, parse_settings
    from remat_kit._show import measurement

    policy = options.policy_of(args)
    where = remat_kit.target(args.target)
    settings = parse_settings(args.set)
    with progress(f"making {args.program}"):
        fn, fn_args, kwargs = load(args.program, settings)
    with progress(f"compiling {args.program} for {where}"), told(args.program, "measuring"):
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
    present(args, m, lambda console: measurement.print_measurement(m, console, top=args.top))
    return 1 if m.fits is False else 0


def compare(args: argparse.Namespace) -> int:
    """Several policies side by side."""
    import remat_kit
    from remat_kit._load import load, parse_settings

    where = remat_kit.target(args.target)
    settings = parse_settings(args.set)
    with progress(f"making {args.program}"):
        fn, fn_args, kwargs = load(args.program, settings)
    chosen = {"policies": {text: options.read_policy(text) for text in args.policy}} if args.policy else {}
    with told(args.program, "comparing"), contextlib.redirect_stdout(sys.stderr):
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
    present(args, c, c.print)
    return 0 if c.best else 1


def plan(args: argparse.Namespace) -> int:
    """The cheapest plan within a budget."""
    import remat_kit
    from remat_kit._show.plan import print_explanation

    plan = _planned(args, remat_kit.plan, "planning", budget=args.budget)
    if args.save is not None:
        plan.save(args.save)
    present(args, plan, lambda console: print_explanation(plan, console) if args.explain else plan.print(console))
    return 0 if plan.within else 1


def frontier(args: argparse.Namespace) -> int:
    """The plans that no other beats."""
    import remat_kit

    found = _planned(args, remat_kit.frontier, "planning", points=args.points)
    return present(args, found, found.print)


def _planned(args: argparse.Namespace, verb: Callable[..., Any], doing: str, **asked: Any) -> Any:
    import remat_kit
    from remat_kit._load import load, parse_settings

    where = None if args.target == "none" else remat_kit.target(args.target)
    settings = parse_settings(args.set)
    with progress(f"making {args.program}"):
        fn, fn_args, kwargs = load(args.program, settings)
    with told(args.program, doing), contextlib.redirect_stdout(sys.stderr):
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
            **asked,
            **kwargs,
        )


def lint(args: argparse.Namespace) -> int:
    """Looks for remat that does nothing, does harm, or is not what it seems."""
    import remat_kit
    from remat_kit._show.findings import print_findings

    found = _verified(args, remat_kit.lint, "linting", target=args.target, select=args.select, ignore=args.ignore)
    present(args, found, lambda console: print_findings(found, console))
    return 1 if found else 0


def check(args: argparse.Namespace) -> int:
    """Runs a function with and without remat, and compares."""
    import remat_kit
    from remat_kit._show.check import print_check

    found = _verified(args, remat_kit.check, "checking")
    present(args, found, lambda console: print_check(found, console))
    return 0 if found.ok else 1


def _verified(args: argparse.Namespace, verb: Callable[..., Any], doing: str, **asked: Any) -> Any:
    from remat_kit._load import load, parse_settings

    policy = options.policy_of(args)
    settings = parse_settings(args.set)
    with progress(f"making {args.program}"):
        fn, fn_args, kwargs = load(args.program, settings)
    with progress(f"{doing} {args.program}"), told(args.program, doing):
        return verb(fn, *fn_args, policy=policy, argnums=args.argnums, has_aux=args.has_aux, **asked, **kwargs)


def targets(args: argparse.Namespace) -> int:
    """What can be compiled for here."""
    import remat_kit
    from remat_kit._show.targets import print_targets

    found = remat_kit.targets()
    data = {"schema": 1, "targets": [t.to_dict() for t in found]}
    return show(args, lambda: data, lambda console: print_targets(found, console))


def _report(name: str, program: Loaded, policy: Any, **asked: Any) -> Residuals:
    import remat_kit

    fn, args, kwargs = program
    with progress(f"tracing {name}" + (f" under {policy}" if policy is not None else "")), told(name, "tracing"):
        return remat_kit.residuals(fn, *args, policy=policy, **asked, **kwargs)


def policies(args: argparse.Namespace) -> int:
    """The presets."""
    import remat_kit
    from remat_kit._show.presets import print_presets

    names = args.names or list(remat_kit.presets)
    found = [(name, remat_kit.presets[name]) for name in names]  # an unknown one raises UnknownPolicyError
    data = [{"name": name, "doc": str(getattr(p, "doc", "") or ""), "policy": str(p)} for name, p in found]
    whole = bool(args.names)
    return show(
        args, lambda: {"schema": 1, "policies": data}, lambda console: print_presets(data, console, whole=whole)
    )


def doctor(args: argparse.Namespace) -> int:
    """Versions, devices, limits, and what is missing."""
    from remat_kit import _doctor

    with progress("looking around"):
        facts = _doctor.examine()

    def table(console: Console) -> None:
        from remat_kit._show import doctor

        doctor.print_facts(facts, console)

    show(args, lambda: facts, table)
    return 1 if facts["problems"] else 0


def demo(args: argparse.Namespace) -> int:
    """The built-in GPT under several presets."""
    from remat_kit._load import load
    from remat_kit._show import text

    with progress("making zoo:gpt"):
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

    written = {} if args.json else _demo_files(detail)

    def table(console: Console) -> None:
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
            *(f"{title}  {where}" for title, where in written.items()),
        ):
            console.print(Text(line))

    def data() -> Any:
        return {"schema": 1, "reports": {k: r.to_dict() for k, r in reports.items()}, "refused": refused}

    return show(args, data, table)


def _demo_files(report: Residuals) -> dict[str, str]:
    """Writes the report as a page and as a picture, and tells where."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="remat-kit-demo-"))
    written = {"As a page:       ": str(report.to_html(folder / "residuals.html"))}
    picture = folder / "residuals.png"
    try:
        save_plot(report, str(picture))
    except RematError as e:  # matplotlib is an extra
        return {**written, "As a picture:    ": str(e)}
    return {**written, "As a picture:    ": str(picture)}
