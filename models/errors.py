"""The one exception that loading a base model or its tokenizer raises."""


class ModelError(ValueError):
    """A base model or tokenizer is refused: the message names the file, the field, and the cure.

    Raised while a model or tokenizer is loaded, and when a chat template refuses a conversation.
    """
