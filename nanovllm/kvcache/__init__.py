"""Where keys and values live, and which of them attention reads."""
