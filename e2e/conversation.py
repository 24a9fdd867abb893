"""A conversation of real text (`conversation.txt`), and its tokens: one per byte of its UTF-8 form."""

from pathlib import Path

FIRST_TOKEN = 3
"""The token of byte 0; the ids below are the tiny checkpoints' padding, begin and end."""

TRANSCRIPT = Path(__file__).with_name("conversation.txt")
REPLY_MARK = "\nAssistant:"


def prompts() -> list[str]:
    """What the model is given at each turn: all that was said so far, up to where its reply begins."""
    said, given = "", []
    for part in TRANSCRIPT.read_text(encoding="utf-8").split(REPLY_MARK)[:-1]:
        said += part + REPLY_MARK
        given.append(said)
    return given


def encode(text: str) -> tuple[int, ...]:
    """The token ids of `text`."""
    return tuple(byte + FIRST_TOKEN for byte in text.encode())


def decode(tokens: tuple[int, ...]) -> str:
    """The text of tokens made by `encode`."""
    return bytes(token - FIRST_TOKEN for token in tokens).decode()
