"""The methods that are served, as the table of the README: `python -m scute_jax.peft.table`."""

from scute_jax.peft.registry import Method, methods

HEADER = "| method | peft_type | equation | live slots |\n| --- | --- | --- | --- |"
BEGIN, END = "<!-- methods:", "<!-- /methods -->"


def method_table() -> str:
    """The registry as Markdown, one line a method."""
    return "\n".join([HEADER, *map(_line, methods())])


def with_table(readme: str) -> str:
    """The README with the table of today between its two markers."""
    head, begin, rest = readme.partition(BEGIN)
    marker, newline, rest = rest.partition("\n")
    _, end, tail = rest.partition(END)
    return head + begin + marker + newline + "\n" + method_table() + "\n\n" + end + tail


def _line(method: Method) -> str:
    live = ", ".join(method.live) or "-"
    where = f"{method.peft_type}, `{method.variant}`" if method.variant else method.peft_type
    return f"| {method.name} | {where} | `{method.equation}` | {live} |"


if __name__ == "__main__":
    print(method_table())
