"""The native CPU path: C++ kernels behind a plain C interface, bound with ctypes."""
