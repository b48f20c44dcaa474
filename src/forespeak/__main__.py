"""``python -m forespeak``, the same as the command ``forespeak``."""

from __future__ import annotations

from forespeak.cli import main

main()
