"""Tasks that tell whether a model still finds what is in its prompt."""
