"""Import this before gRPC: it reads these variables once. What the operator has set stays.

Each service's package imports it first, since a package's `__init__` runs before any of its modules.
"""

from __future__ import annotations

import os

# Children are started by fork and exec while gRPC's threads run. Its fork handlers are of use only to children that
# go on using gRPC without exec, and print a warning for all others.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# gRPC's own log lines (a GOAWAY, a taken port) are no JSON and say less than the error that follows them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
