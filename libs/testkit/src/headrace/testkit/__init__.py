"""Real clusters of real processes, for tests."""

import headrace.base.grpc_environment  # noqa: F401  # before gRPC is
