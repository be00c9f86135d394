"""Sparse attention as a plug-in: one policy a file, one line a policy in the registry."""
