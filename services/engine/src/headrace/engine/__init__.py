"""The engine: paged-KV continuous batching behind gRPC."""

import os

# Before gRPC is imported: the worker process is started by fork and exec while gRPC's threads run, and its fork
# handlers, of use only to children that go on using gRPC without exec, would print a warning for each.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
