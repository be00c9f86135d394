"""Triton kernels. Imported only where they run: on CUDA, or under the interpreter in tests."""
