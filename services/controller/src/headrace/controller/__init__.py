"""What is wanted, made real: engine processes start, stop and are replaced."""

import headrace.base.grpc_environment  # noqa: F401  # before gRPC is
