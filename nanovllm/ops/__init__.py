"""Attention and its helpers as functions of tensors. Nothing here knows of models or requests."""
