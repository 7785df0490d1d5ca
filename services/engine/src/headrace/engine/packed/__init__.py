"""Weights in the form the native kernels multiply, in a file that is mapped: no torch, no copy, nothing to convert."""
