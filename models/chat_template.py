"""Chat templates: Jinja programs that come with a checkpoint and are therefore run in a sandbox.

The environment (whitespace rules, filters, globals) is the one templates are written for.
Source: transformers 5.24, utils/chat_template_utils.py, whose output the tests compare with.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from scute_jax.models.errors import ModelError


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
) -> str:
    """The text of a conversation. `special_tokens` are visible by name: bos_token, eos_token, ...

    Raises: ModelError if the messages are malformed, or the template refuses them.
    """
    if isinstance(messages, str | Mapping) or not messages:
        raise ModelError("messages must be a list of at least one {'role': ..., 'content': ...}.")
    plain = [_plain(message) for message in messages]
    for message in plain:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ModelError(
                f"a message is {message!r:.100}, but it must be an object with a role."
            )
    # Templates test for a missing key; None is how some callers spell it.
    plain = [{key: value for key, value in m.items() if value is not None} for m in plain]
    try:
        return _compiled(template).render(
            messages=plain,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    # A template is a foreign program: what goes wrong in it is its verdict on the messages.
    except Exception as error:
        raise ModelError(
            f"the model's chat template refuses the conversation: {error} ({type(error).__name__})."
        ) from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote: the text as it stands."""

    tags = {"generation"}

    def parse(self, parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """A namespace without names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not set {name!r} on a namespace")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Python writes it; the filter of Jinja itself would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _plain(value: Any) -> Any:
    """The value made of JSON types only, so that a template meets no object with methods."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise ModelError(f"a message holds a {type(value).__name__}; it must hold JSON values only.")
