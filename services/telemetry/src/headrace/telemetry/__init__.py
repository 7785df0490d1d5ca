"""Finished facts: traces, usage and audit, kept and looked up."""

import headrace.base.grpc_environment  # noqa: F401  # before gRPC is
