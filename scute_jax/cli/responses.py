"""Completions as lines of a result file, in the form of the request."""

from collections.abc import Mapping
from typing import Any

from scute_jax.cli.requests import URLS, Line
from scute_jax.serving.request import Completion

FINISH = {"stop": "stop", "length": "length"}


def to_json(line: Line, completion: Completion) -> dict[str, Any]:
    """The record of one request: fields of Completion, or an OpenAI batch response."""
    return _own(completion) if line.model is None else _openai(line, completion)


def refusal(line: Line) -> Completion:
    """The completion of a line that holds no request."""
    return Completion(line.id, None, "", (), "error", error=line.error)


def _own(completion: Completion) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": completion.id,
        "adapter": completion.adapter,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "logprobs": completion.logprobs,
        "prompt_logprobs": completion.prompt_logprobs,
        "error": completion.error,
    }
    for name in ("top_logprobs", "prompt_top_logprobs"):
        if getattr(completion, name) is not None:
            record[name] = getattr(completion, name)
    return record


def _openai(line: Line, completion: Completion) -> dict[str, Any]:
    record: dict[str, Any] = {"id": f"batch-{completion.id}", "custom_id": completion.id}
    if completion.error is not None:
        error = {"code": "invalid_request", "message": completion.error}
        return record | {"response": None, "error": error}
    chat = URLS.get(line.url or "") == "messages"
    choice: dict[str, Any] = {"index": 0, "finish_reason": FINISH[completion.finish_reason]}
    if chat:
        choice["message"] = {"role": "assistant", "content": completion.text}
    else:
        choice["text"] = completion.text
    choice["logprobs"] = _logprobs(completion, chat)
    used = completion.prompt_tokens, len(completion.token_ids)
    body = {
        "id": completion.id,
        "object": "chat.completion" if chat else "text_completion",
        "model": line.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": used[0],
            "completion_tokens": used[1],
            "total_tokens": sum(used),
        },
    }
    response = {"status_code": 200, "request_id": completion.id, "body": body}
    return record | {"response": response, "error": None}


def _logprobs(completion: Completion, chat: bool) -> Mapping[str, Any] | None:
    """Tokens are named by their ids: pieces of text need not be whole characters."""
    if completion.logprobs is None:
        return None
    ids, scores = completion.token_ids, completion.logprobs
    top = completion.top_logprobs or [{}] * len(ids)
    if not chat:
        return {
            "tokens": [f"token_id:{i}" for i in ids],
            "token_logprobs": scores,
            "top_logprobs": [{f"token_id:{i}": p for i, p in t.items()} for t in top],
        }
    content = [
        {
            "token": f"token_id:{i}",
            "logprob": p,
            "top_logprobs": [{"token": f"token_id:{j}", "logprob": q} for j, q in t.items()],
        }
        for i, p, t in zip(ids, scores, top, strict=True)
    ]
    return {"content": content}
