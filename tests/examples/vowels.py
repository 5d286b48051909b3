"""A reward that depends on the answer's text."""


def vowels(response: str) -> float:
    """Vowels and digits per character."""
    return sum(character in "aeiou0123456789" for character in response) / max(len(response), 1)
