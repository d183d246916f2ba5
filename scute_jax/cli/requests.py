"""Lines of a request file, in our own form or that of the OpenAI batch API.

{"id", "prompt" | "messages" | "prompt_token_ids", "adapter", "scale", any field of SamplingParams}
{"custom_id", "method", "url", "body": {"model", "messages" | "prompt", ...}}
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from scute_jax.serving.request import Request, RequestError, SamplingParams

SAMPLING = frozenset(field.name for field in fields(SamplingParams))
PROMPTS = ("prompt", "messages", "prompt_token_ids")
URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
# Fields of an OpenAI body that say the same here, or say nothing about the text.
SAME = ("temperature", "top_p", "seed", "stop", "max_tokens", "top_k", "ignore_eos")
SILENT = frozenset(("user", "metadata", "store", "service_tier", "safety_identifier"))
OFF = {"n": 1, "stream": False, "presence_penalty": 0, "frequency_penalty": 0, "echo": False}


@dataclass(frozen=True)
class Line:
    """One line: the request in it, or what is wrong with it.

    `model` is set for a line of the OpenAI form, which is answered in that form.
    """

    id: str
    request: Request | None
    error: str | None = None
    model: str | None = None
    url: str | None = None


def parse_line(
    text: str | bytes, number: int, adapters: Collection[str], base: Collection[str]
) -> Line:
    """The request in a line; `number` counts from 1 and names a line that has no id.

    `base` holds the names by which an OpenAI body may ask for the base model.
    """
    name = f"line-{number}"
    try:
        data = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8, a number too long
        return Line(name, None, f"line {number} is no JSON: {error}.")
    if not isinstance(data, dict):
        return Line(name, None, f"line {number} is no JSON object.")
    openai = "custom_id" in data or "body" in data
    given = data.get("custom_id" if openai else "id")
    name = name if given is None else str(given)
    body = data.get("body") if openai else None
    model = str(body.get("model", "")) if isinstance(body, dict) else ("" if openai else None)
    url = str(data.get("url", "")) if openai else None
    try:
        make = _from_openai if openai else _from_own
        return Line(name, make(data, name, adapters, base), None, model, url)
    except RequestError as error:
        return Line(name, None, f"line {number}: {error}", model, url)


def _from_own(data: Mapping[str, Any], name: str, adapters, base) -> Request:
    del adapters, base
    known = {"id", "adapter", "scale", *PROMPTS, *SAMPLING}
    _refuse_unknown(data, known)
    sampling = {key: data[key] for key in SAMPLING if data.get(key) is not None}
    return Request(
        id=name,
        adapter=data.get("adapter"),
        scale=1.0 if data.get("scale") is None else data["scale"],
        sampling=SamplingParams(**sampling),
        **{key: data.get(key) for key in PROMPTS},
    )


def _from_openai(
    data: Mapping[str, Any], name: str, adapters: Collection[str], base: Collection[str]
) -> Request:
    _refuse_unknown(data, {"custom_id", "method", "url", "body"})
    body, url = data.get("body"), data.get("url")
    if not isinstance(body, dict):
        raise RequestError("body has to be an object.")
    if not isinstance(url, str) or url not in URLS:
        raise RequestError(f"url has to be one of {', '.join(URLS)}, not {url!r}.")
    if data.get("method") not in (None, "POST"):
        raise RequestError(f"method has to be POST, not {data['method']!r}.")
    chat = URLS[url] == "messages"
    limits = {"max_completion_tokens"} if chat else set()
    logprobs = {"logprobs", "top_logprobs"} if chat else {"logprobs"}
    _refuse_unknown(body, {"model", URLS[url], *SAME, *SILENT, *OFF, *limits, *logprobs})
    for key, neutral in OFF.items():
        if body.get(key) not in (None, neutral):
            raise RequestError(f"{key}={body[key]!r} is not served; leave it out.")
    model = body.get("model")
    if not isinstance(model, str) or (model not in adapters and model not in base):
        raise RequestError(
            f"model {model!r} is neither an adapter nor the base model; "
            f"there are: {', '.join([*sorted(adapters)[:8], *base])}."
        )
    sampling = {key: body[key] for key in SAME if body.get(key) is not None}
    if body.get("max_completion_tokens") is not None:
        sampling["max_tokens"] = body["max_completion_tokens"]
    wanted = body.get("logprobs")
    if chat and body.get("top_logprobs") is not None and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true.")
    if chat and wanted:
        sampling["logprobs"] = body.get("top_logprobs") or 0
    elif not chat and wanted is not None:
        sampling["logprobs"] = wanted
    prompt = body.get(URLS[url])
    ids = not chat and isinstance(prompt, list)
    return Request(
        id=name,
        adapter=model if model in adapters else None,
        sampling=SamplingParams(**sampling),
        **{"prompt_token_ids" if ids else URLS[url]: prompt},
    )


def _refuse_unknown(data: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = [key for key in data if key not in known]
    if unknown:
        raise RequestError(
            f"unknown field(s) {', '.join(map(repr, unknown[:5]))}; known are "
            f"{', '.join(sorted(known))}."
        )
