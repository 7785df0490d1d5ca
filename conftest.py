"""What every test process needs before anything else is imported."""

from __future__ import annotations

import os

# Read once, when torch is first imported: its threads otherwise spin at the end of every parallel region, and on a busy
# machine of two cores tests of seconds take minutes. The engine's worker does the same for itself.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
