"""The command line. Importing it imports neither torch nor numpy."""

from __future__ import annotations


def main() -> None:
    """Entry point of the ``forespeak`` command."""
    from forespeak.cli.app import run

    run()
