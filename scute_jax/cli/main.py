"""Parses the command line and hands over to one function per command."""

import argparse
import sys
from collections.abc import Sequence

from scute_jax.cli import bench, convert, demo, generate, inspect

COMMANDS = {
    "generate": generate,
    "inspect": inspect,
    "convert": convert,
    "bench": bench,
    "demo": demo,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `scute`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scute",
        description="Adapters of every common PEFT method in one batch over one frozen base model.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = module.__doc__.partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
    args = parser.parse_args(argv)
    try:
        return COMMANDS[args.command].run(args)
    except ValueError as error:  # ours: they name the file, the field and the cure
        print(f"scute {args.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"scute {args.command}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"scute {args.command}: stopped.", file=sys.stderr)
        return 130
