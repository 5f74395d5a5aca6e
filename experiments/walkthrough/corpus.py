"""A corpus of sentences about rivers and about money, which share the noun "bank"."""

import itertools


# "bank" occurs as often in sentences about rivers as in sentences about money.
NATURE = (["river", "stream", "lake"], ["muddy", "green", "steep"])
MONEY = (["money", "cash", "loan"], ["rich", "closed", "strict"])


def sentences() -> list[list[str]]:
    """Returns all 36 sentences of five words; the other words tell which kind of bank is meant."""
    return [
        ["the", thing, "bank", verb, quality]
        for things, qualities in (NATURE, MONEY)
        for thing, verb, quality in itertools.product(things, ["was", "looked"], qualities)
    ]


def vocabulary() -> list[str]:
    """Returns all words of the corpus in alphabetical order."""
    return sorted({word for sentence in sentences() for word in sentence})
