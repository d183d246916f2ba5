"""The one exception of this package that callers are expected to catch."""


class AdapterError(ValueError):
    """An adapter is refused, whole: the message names the file, the tensor or field, and the cure.

    Raised while an adapter is loaded, stacked, admitted to a bank, exported or named by a request;
    never while a batch runs. Nothing of a refused adapter is kept.
    """
