"""Between protobuf messages and the core's types."""
