"""The `headrace` command and the local stack."""

import headrace.base.grpc_environment  # noqa: F401  # before gRPC is
