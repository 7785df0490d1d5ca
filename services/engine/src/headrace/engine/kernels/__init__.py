"""Implementations of the operations that touch the paged KV cache, one package per kind of hardware."""
