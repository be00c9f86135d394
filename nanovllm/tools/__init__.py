"""Tools around the engine that no engine module imports at import time."""
