"""The OpenAI-compatible edge: HTTP in and out, the same admission behind it as behind gRPC."""
