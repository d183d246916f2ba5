"""The text of one request as its tokens come: decoding, stop strings, what may be shown already."""

from dataclasses import dataclass, field

from scute_jax.models.tokenizer import StreamDecoder


@dataclass
class TextStream:
    """Text that grows token by token and ends at a stop string.

    Text that may turn out to be the beginning of a stop string is held back until it is not.
    """

    decoder: StreamDecoder | None  # None: the model has no tokenizer, the text stays empty
    stop: tuple[str, ...] = ()
    text: str = ""
    shown: int = 0
    stopped: bool = False
    _longest: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._longest = max(map(len, self.stop), default=0)

    def push(self, token: int) -> bool:
        """Adds a token; True once a stop string is complete, which then ends the text."""
        if self.decoder is not None:
            self._add(self.decoder.push(token))
        return self.stopped

    def finish(self) -> None:
        """Adds what the decoder still holds back."""
        if self.decoder is not None and not self.stopped:
            self._add(self.decoder.finish())

    def take(self, final: bool = False) -> str:
        """Text that is certain and was not taken before."""
        end = len(self.text) if final or self.stopped else len(self.text) - self._open()
        new, self.shown = self.text[self.shown : end], max(end, self.shown)
        return new

    def _add(self, piece: str) -> None:
        searched = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        found = [self.text.find(stop, searched) for stop in self.stop]
        ends = [place for place in found if place >= 0]
        if ends:
            self.text, self.stopped = self.text[: min(ends)], True

    def _open(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self.stop):
                return length
        return 0
