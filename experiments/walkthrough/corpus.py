"""Sentences of two worlds, rivers and money, that have one word in common."""

import itertools


# A corpus in which "bank" stands by a river as often as it lends money.
NATURE = (["river", "stream", "lake"], ["muddy", "green", "steep"])
MONEY = (["money", "cash", "loan"], ["rich", "closed", "strict"])


def sentences() -> list[list[str]]:
    """Every sentence of the corpus, five words each: a word of context decides what bank is."""
    return [
        ["the", thing, "bank", verb, quality]
        for things, qualities in (NATURE, MONEY)
        for thing, verb, quality in itertools.product(things, ["was", "looked"], qualities)
    ]


def vocabulary() -> list[str]:
    """All words of the corpus in the order of the alphabet."""
    return sorted({word for sentence in sentences() for word in sentence})
