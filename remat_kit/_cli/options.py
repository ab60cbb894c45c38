"""Options that several commands of `remat-kit` take, and what is read from them."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from remat_kit._errors import RematError


def program_options(p: argparse.ArgumentParser) -> None:
    """A program, and how it is made and differentiated."""
    p.add_argument("program", metavar="PROGRAM", help="zoo:NAME or package.module:factory")
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of the zoo model or argument of the factory (repeatable); JSON, else a string",
    )
    p.add_argument(
        "--argnums", type=argnums, default=0, metavar="N[,N]", help="arguments to differentiate by, as in jax.grad"
    )
    p.add_argument("--has-aux", action="store_true", help="fn returns (loss, other), as in jax.grad")


def policy_options(p: argparse.ArgumentParser) -> None:
    """A policy, for all blocks or some."""
    p.add_argument("--policy", help="preset, policy text or plan.json; as written without it")
    p.add_argument(
        "--block",
        action="append",
        default=[],
        metavar="GLOB=POLICY",
        help="policy for some blocks (repeatable; the first that matches wins, --policy is for the rest)",
    )


def target_options(p: argparse.ArgumentParser) -> None:
    """What to compile for."""
    p.add_argument(
        "--target", default="local", help="what to compile for: local, cpu, tpu:v5e, cuda:h100 ... (targets)"
    )
    p.add_argument("--time", action="store_true", help="run and time it too, on attached devices")
    p.add_argument("--keep-barriers", action="store_true", help="CPU of JAX 0.10.2: keep recomputation apart")
    p.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="end a compiler that takes longer")


def plan_options(p: argparse.ArgumentParser) -> None:
    """What to plan for, and with what."""
    p.add_argument(
        "--target", default="local", help="what to compile for: local, cpu, tpu:v5e, ... (targets); none for no target"
    )
    p.add_argument(
        "--action",
        action="append",
        default=[],
        choices=("save", "offload"),
        help="what may be done besides recomputing (repeatable); both without it",
    )
    p.add_argument("--minimize", choices=("time", "flops"), default="time", help="the roofline's time, or FLOPs")
    p.add_argument("--compiles", type=count, default=4, metavar="N", help="programs to compile at the most (4)")
    p.add_argument("--split", action="store_true", help="run scans in two parts where that fills the budget better")
    p.add_argument("--names-only", action="store_true", help="choose among the program's own checkpoint names")
    p.add_argument("--keep-barriers", action="store_true", help="CPU of JAX 0.10.2: keep recomputation apart")
    p.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="end a compiler that takes longer")


def file_options(p: argparse.ArgumentParser, *, plot: bool = True, timeline: bool = False) -> None:
    """Files to write besides."""
    p.add_argument("--html", metavar="FILE", help="write a page for a browser too")
    if plot:
        p.add_argument("--plot", metavar="FILE", help="write a picture too: picture.png, .svg, .pdf (extra plot)")
    if timeline:
        p.add_argument(
            "--timeline", metavar="FILE", help="write memory over time too: .json for Perfetto, .speedscope.json"
        )


def policy_of(args: argparse.Namespace) -> Any:
    """A policy, or `{block glob: policy}` where there are --block options."""
    if not args.block:
        return read_policy(args.policy)
    blocks: dict[str, str] = {}
    for item in args.block:
        glob, equals, policy = item.partition("=")  # a glob has no "=", the text form of a policy does
        if not (glob and equals and policy):
            raise RematError(f"--block {item!r}: expected GLOB=POLICY, such as 'layers_0=none'.")
        if glob in blocks:
            raise RematError(f"--block {glob}=...: given twice.")
        blocks[glob] = policy
    if args.policy is not None:
        blocks.setdefault("**", args.policy)
    return blocks


def read_policy(text: str | None) -> Any:
    """A policy as text, or the plan in a file."""
    if text is None or not text.endswith(".json"):
        return text
    import remat_kit

    return remat_kit.Plan.load(text)


def target_settings(args: argparse.Namespace, where: Any) -> dict[str, Any]:
    """What the analyses are told of a target."""
    return {"target": where, "time": args.time, "keep_barriers": args.keep_barriers, "timeout": args.timeout}


def count(text: str) -> int:
    """A number, as an option."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def budget(text: str) -> str | float:
    """A budget, as an option: a share of the memory, or a size as text."""
    with contextlib.suppress(ValueError):
        share = float(text)
        return share if 0 < share <= 1 and "." in text else text
    return text


def argnums(text: str) -> int | tuple[int, ...]:
    """Positions of arguments, as an option."""
    try:
        numbers = tuple(int(t) for t in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a position, or several with commas between") from None
    return numbers[0] if len(numbers) == 1 else numbers
