"""Plain torch: runs anywhere, and is the oracle that faster kernels are tested against."""
