"""What the stories compare of answers."""

from collections.abc import Iterable

from e2e.harness import Answer


def tokens_of(answers: Iterable[Answer]) -> list[tuple[int, ...]]:
    """What each consists of."""
    return [answer.tokens for answer in answers]


def cached(answers: Iterable[Answer]) -> list[int]:
    """Prompt tokens of each that the engine did not compute."""
    return [answer.cached_tokens for answer in answers]


def served(answers: Iterable[Answer]) -> list[int]:
    """As `cached`, where all of them must come from UCM and none from the engine's own cache."""
    found = [(answer.cached_tokens, answer.external_tokens) for answer in answers]
    assert all(own == external for own, external in found), f"(cached, of these from UCM): {found}"
    return [external for _, external in found]
