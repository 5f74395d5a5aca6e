"""Sentences about rivers and about money, which have one noun in common."""

import itertools


# The noun "bank" stands by a river as often as it lends money.
NATURE = (["river", "stream", "lake"], ["muddy", "green", "steep"])
MONEY = (["money", "cash", "loan"], ["rich", "closed", "strict"])


def sentences() -> list[list[str]]:
    """All 36 sentences, of five words each; the words beside bank decide which bank is meant."""
    return [
        ["the", thing, "bank", verb, quality]
        for things, qualities in (NATURE, MONEY)
        for thing, verb, quality in itertools.product(things, ["was", "looked"], qualities)
    ]


def vocabulary() -> list[str]:
    """All words of the corpus in alphabetical order."""
    return sorted({word for sentence in sentences() for word in sentence})
