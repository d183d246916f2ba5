"""What a launched step gave, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from scute_jax.serving.sampling import TokenScores
from scute_jax.serving.scheduler import DecodeWork, PrefillWork
from scute_jax.serving.sequence import Sequence, Token
from scute_jax.serving.steps import Drawn


@dataclass
class Launched:
    """A step on its way: what it computes for whom, and the arrays that it will fill."""

    work: PrefillWork | DecodeWork
    drawn: Drawn
    prompt_scores: TokenScores | None = None

    def __post_init__(self) -> None:
        jax.tree.map(lambda array: array.copy_to_host_async(), (self.drawn, self.prompt_scores))


def generated(launched: Launched) -> Iterator[tuple[Sequence, Token]]:
    """The generated tokens of a step, in order for each sequence. Waits until the step has run."""
    work, drawn = launched.work, _on_host(launched.drawn)
    if isinstance(work, PrefillWork):
        fresh = [(j, s) for j, s in enumerate(work.complete) if s not in work.resumed]
        for j, sequence in fresh:
            yield (
                sequence,
                _token(drawn.token, drawn.scores, (0, j), sequence.request.sampling.logprobs),
            )
        return
    first = work.size - len(work.sequences)
    for i, sequence in enumerate(work.sequences, first):
        for step in np.flatnonzero(drawn.valid[:, i]):
            at = (step, i)
            yield (
                sequence,
                _token(drawn.token, drawn.scores, at, sequence.request.sampling.logprobs),
            )


def prompt_scores(launched: Launched) -> Iterator[tuple[Sequence, int, Token]]:
    """The scores of prompt tokens with their positions, for sequences that want them."""
    work, scores = launched.work, launched.prompt_scores
    if scores is None or not isinstance(work, PrefillWork):
        return
    scores, n = _on_host(scores), launched.drawn.token.shape[1]
    size = len(scores.logprob) // n
    for i, (sequence, first, count) in enumerate(work.blocks):
        if sequence.wants_prompt_logprobs:
            last = min(first + count, len(sequence.prompt) - 1)
            for position in range(first + 1, last + 1):
                token = np.asarray(sequence.prompt[position])
                row = i * size + position - 1 - first
                count_top = sequence.request.sampling.prompt_logprobs
                yield sequence, position, _token(token, scores, (row,), count_top)


def _token(tokens: np.ndarray, scores: TokenScores, at: tuple, top: int | None) -> Token:
    token = int(tokens[at] if tokens.ndim else tokens)
    ids, values = scores.top_token[at][: top or 0], scores.top_logprob[at][: top or 0]
    alternatives = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return Token(token, float(scores.logprob[at]), alternatives)


def _on_host(arrays):
    return jax.tree.map(np.asarray, arrays)
