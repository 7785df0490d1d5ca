"""Who may enter, and the way of one request."""

import headrace.base.grpc_environment  # noqa: F401  # before gRPC is
