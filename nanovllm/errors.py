"""The errors a caller may want to catch; anything else that escapes is a bug of nanovllm."""


class ConfigError(ValueError):
    """A setting, file or argument that nanovllm cannot work with.

    The message says what was wrong, what it was, what is allowed and how to mend it.
    """


class CapacityError(RuntimeError):
    """Something does not fit in memory, on disk or in the model's context.

    The message says how much is needed and how much there is, in the same unit.
    """


class BackendUnavailableError(ImportError):
    """A backend was asked for that cannot run here.

    The message says why and which package or extra to install.
    """
