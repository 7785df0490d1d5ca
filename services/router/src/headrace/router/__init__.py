"""Which replica runs a request, and why."""

import headrace.base.grpc_environment  # noqa: F401  # before gRPC is
