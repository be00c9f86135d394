"""From requests to tokens: scheduling, block bookkeeping, running the model, sampling."""
