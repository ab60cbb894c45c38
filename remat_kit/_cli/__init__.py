"""The command `remat-kit`: the verbs of the package, on programs named on the command line.

Results go to standard output, progress and errors to standard error. Exit status: 0 fine, 1 findings, 2 wrong use.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence

from remat_kit._cli import commands, options
from remat_kit._cli.output import check_files, warnings_in_one_line
from remat_kit._errors import RematError

_BY = ("block", "name", "op", "path", "source", "dtype", "action")


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
        check_files(args)
        with warnings_in_one_line():
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
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")

    p = verbs.add_parser("residuals", parents=[common], help="what reverse mode keeps, with bytes and costs")
    options.program_options(p)
    options.policy_options(p)
    p.add_argument("--top", type=options.count, metavar="N", help="show the N largest rows of each table")
    shown = p.add_mutually_exclusive_group()
    shown.add_argument("--by", choices=_BY, help="sum the bytes by this instead of listing values")
    shown.add_argument("--diff", metavar="POLICY", help="show what changes when every block has this policy instead")
    options.file_options(p)
    p.set_defaults(run=commands.residuals)

    p = verbs.add_parser("measure", parents=[common], help="what XLA makes of a step: memory, cost, does it fit")
    options.program_options(p)
    options.policy_options(p)
    options.target_options(p)
    p.add_argument("--step", action="store_true", help="compile fn as it is (a whole step), not its value and gradient")
    p.add_argument("--against", metavar="POLICY", help="compile under this policy too, to see what the other does")
    p.add_argument("--top", type=options.count, default=10, metavar="N", help="show the N largest buffers at the peak")
    options.file_options(p, timeline=True)
    p.set_defaults(run=commands.measure)

    p = verbs.add_parser("compare", parents=[common], help="several policies side by side, compiled")
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
    options.file_options(p)
    p.set_defaults(run=commands.compare)

    p = verbs.add_parser("plan", parents=[common], help="the cheapest plan whose compiled peak is within a budget")
    options.program_options(p)
    options.plan_options(p)
    p.add_argument(
        "--budget", type=options.budget, help="peak to keep within: 14GiB, or a share of the memory such as 0.9"
    )
    p.add_argument("--explain", action="store_true", help="say for each value what becomes of it and why")
    p.add_argument("--save", metavar="FILE", help="write the plan as JSON, which --policy takes")
    options.file_options(p)
    p.set_defaults(run=commands.plan)

    p = verbs.add_parser("frontier", parents=[common], help="the plans that no other beats on memory and cost")
    options.program_options(p)
    options.plan_options(p)
    p.add_argument("--points", type=options.count, default=12, metavar="N", help="budgets to plan for (12)")
    options.file_options(p)
    p.set_defaults(run=commands.frontier)

    p = verbs.add_parser("lint", parents=[common], help="remat that does nothing, does harm, or is not what it seems")
    options.program_options(p)
    options.policy_options(p)
    p.add_argument("--target", help="compile for it too, for the rules on what the compiler makes of remat (targets)")
    p.add_argument("--select", action="append", metavar="CODE", help="only codes that begin so (repeatable)")
    p.add_argument("--ignore", action="append", metavar="CODE", help="no codes that begin so (repeatable)")
    options.file_options(p, plot=False)
    p.set_defaults(run=commands.lint)

    p = verbs.add_parser("check", parents=[common], help="run with and without remat: the same values and gradients?")
    options.program_options(p)
    options.policy_options(p)
    options.file_options(p, plot=False)
    p.set_defaults(run=commands.check)

    p = verbs.add_parser("targets", parents=[common], help="what can be compiled for here, and what is missing")
    p.set_defaults(run=commands.targets)

    p = verbs.add_parser("policies", parents=[common], help="the presets: what each keeps and what it costs")
    p.add_argument("names", nargs="*", metavar="NAME", help="only these, with their whole text form")
    p.set_defaults(run=commands.policies)
    p = verbs.add_parser("doctor", parents=[common], help="versions, devices, limits, what is missing")
    p.set_defaults(run=commands.doctor)
    p = verbs.add_parser("demo", parents=[common], help="the built-in GPT under several presets")
    p.set_defaults(run=commands.demo)
    return parser


def _version(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if not args.version:
        parser.print_help(sys.stderr)
        return 2
    import remat_kit

    print(f"remat-kit {remat_kit.__version__}")
    return 0
