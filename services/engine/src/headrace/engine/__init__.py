"""Paged-KV continuous batching behind gRPC."""

import headrace.base.grpc_environment  # noqa: F401  # before gRPC is
