"""Llama-family decoders: `embed_tokens`, a list of `layers`, `norm` and `lm_head`.

The model runner owns the loop over layers, so that an order of computation is a loop nest there
and no model knows of it.
"""
