"""The texts on attention that the steps follow, by author and title."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A text that steps follow.

    Attributes:
        title: the text's title.
        author: its author and date, as far as the text names them.
        short: the name that the steps use for it.
    """

    title: str
    author: str
    short: str

    def __str__(self) -> str:
        return f"“{self.title}” ({self.author})"


LLMS = Document("LLMs Part 2: Attention Mechanism", "Rahul Dubey, 2024", "“LLMs Part 2”")
CODING = Document(
    "Coding Attention Mechanism, Part 1",
    "Hamza Fatnaoui, Hicham Ibn Issaghyr and Ikram Arif",
    "“Coding”",
)
MECHANISMS = Document("Mechanisms of Attention & Transformers", "Duke Kwon, 2024", "“Mechanisms”")
KERNEL = Document(
    "Attention Is All You Need", "an essay with a kernel in C++ and OpenMP", "the essay"
)
INTERACTION = Document("Understanding the attention mechanism", "2023", "“Understanding”")

DOCUMENTS = (MECHANISMS, INTERACTION, CODING, LLMS, KERNEL)
