"""Property tests draw the same examples every time; more of them when asked for everything."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile(
    "spec",
    derandomize=True,
    deadline=None,
    max_examples=1000 if os.environ.get("FORESPEAK_EXHAUSTIVE") else 100,
)
settings.load_profile("spec")
