"""The diagrams of the page. Each function builds one and returns it with its caption."""

from dataclasses import dataclass

import numpy as np

from experiments.walkthrough.drawing import Drawing


@dataclass(frozen=True)
class Diagram:
    """An SVG image, and the sentence below it."""

    svg: str
    caption: str


def one_row(words: list[str], vectors: np.ndarray, query: int) -> Diagram:
    """Draws how attention makes a word's new vector: lines are as thick as its weights.

    Args:
        words: the sentence.
        vectors: a row for each word; the weights are the softmax of their products with the query.
        query: the index of the word that attends.
    """
    powers = np.exp(vectors @ vectors[query])
    weights = powers / powers.sum()
    drawing = Drawing(640, 232, f"the weights of {words[query]} for the words of its sentence")
    drawing.box(165, 4, 310, 36, f"new vector of “{words[query]}”", tone=2)
    for i, (word, weight) in enumerate(zip(words, weights, strict=True)):
        x = 54 + 106.4 * i
        end = 320 + 45 * (i - 2.5), 42
        drawing.line((x, 166), end, width=60 * weight**1.5, opacity=0.75)
        drawing.box(x - 48, 167, 96, 34, word, tone=2 if i == query else 1)
        drawing.text(x, 217, f"{weight:.2f}", faint=True)
    return Diagram(
        drawing.svg(),
        f"Attention in one picture: the new vector of “{words[query]}” is a mean of the vectors of "
        "all words. Words that are more similar to it get a greater weight, a thicker line here. "
        "Step 3 computes these weights.",
    )


def recurrent_and_direct() -> Diagram:
    """Draws the way from the last of five words to the first, in both kinds of network."""
    drawing = Drawing(640, 178, "a chain of states, and direct links from the last word")
    for left, title in ((0, "recurrent: one after the other"), (340, "attention: all at once")):
        drawing.text(left + 150, 14, title)
        for i in range(5):
            x = left + 30 + 60 * i
            drawing.box(x - 22, 140, 44, 32, f"x_{i + 1}", tone=1)
            drawing.box(x - 22, 62, 44, 32, f"h_{i + 1}" if left == 0 else f"y_{i + 1}", tone=2)
            if left == 0:
                drawing.arrow((x, 140), (x, 95))
                if i:
                    drawing.arrow((x - 38, 78), (x - 22, 78))
            else:
                drawing.arrow((x, 140), (590 + 10 * i, 95))
    return Diagram(
        drawing.svg(),
        "Left: x₁ reaches the last state h₅ through every state between. Right: y₅ reads x₁ "
        "directly, and y₁ to y₄ can be computed at the same time.",
    )


def query_key_value_shapes() -> Diagram:
    """Draws the matrices of attention, with the shapes of “Understanding”."""
    drawing = Drawing(640, 372, "X times three matrices gives Q, K and V; from them comes Y")
    drawing.matrix(8, 160, 4, 5, "X", tone=0)
    for y, letter, columns in ((40, "Q", 7), (160, "K", 7), (290, "V", 6)):
        drawing.matrix(210, y, 4, columns, letter, tone={"Q": 1, "K": 2, "V": 3}[letter])
        drawing.arrow((74, 184), (204, y + 24))
        drawing.text(122, {40: 106, 160: 168, 290: 266}[y], f"W_{letter}")
    drawing.matrix(382, 100, 4, 4, "Q Kᵀ")
    drawing.arrow((300, 64), (376, 114))
    drawing.arrow((300, 184), (376, 134))
    drawing.arrow((436, 124), (546, 124))
    drawing.text(490, 108, "softmax", size=15)
    drawing.matrix(552, 100, 4, 4, "L", tone=4)
    drawing.matrix(540, 290, 4, 6, "Y = L V", tone=3)
    drawing.arrow((576, 168), (576, 262))
    drawing.arrow((288, 314), (534, 314))
    return Diagram(
        drawing.svg(),
        "A row is a word. Q and K need as many columns as each other, because each number of a "
        "query is multiplied by one of a key; V may have another number.",
    )


def heads_side_by_side() -> Diagram:
    """Draws four heads that read the same words and write side by side."""
    drawing = Drawing(640, 352, "X goes to four heads; their results stand side by side")
    drawing.box(160, 6, 320, 34, "X: D numbers a word")
    for i in range(4):
        x = 8 + 160 * i
        drawing.arrow((200 + 80 * i, 40), (x + 72, 84))
        drawing.box(x, 86, 144, 66, tone=i + 1)
        drawing.text(x + 72, 106, f"head {i + 1}")
        drawing.text(x + 72, 132, f"Q_{i + 1}  K_{i + 1}  V_{i + 1}")
        drawing.box(160 + 80 * i, 208, 80, 34, "H", tone=i + 1)
        drawing.arrow((x + 72, 152), (200 + 80 * i, 206))
    drawing.arrow((320, 242), (320, 306))
    drawing.text(352, 274, "W_O")
    drawing.box(160, 308, 320, 34, "Y: D numbers a word")
    return Diagram(
        drawing.svg(),
        "Each head has its own queries, keys, values and softmax. The last matrix mixes the "
        "results, which are side by side.",
    )


def transformer_blocks() -> Diagram:
    """Draws a block of the encoder and one of the decoder, with residual connections."""
    drawing = Drawing(640, 560, "a block of the encoder, and one of the decoder")
    parts = {
        165: ("self-attention", "feed-forward"),
        485: ("causal self-attention", "cross-attention", "feed-forward"),
    }
    for x, names in parts.items():
        left = x < 320
        for i, name in enumerate(names):
            y = 438 - 118 * i
            _part(drawing, x, y, name, outside=-1 if left else 1)
            if i:
                drawing.arrow((x, y + 70), (x, y + 35))
        top = 438 - 118 * len(names) + 36
        drawing.frame(x - 150, top, 296, 500 - top, "block, 6 times")
        drawing.arrow((x, 532), (x, 474))
        drawing.text(x, 546, "source words and places" if left else "target words and places")
    # The encoder's result goes to the decoder's second part.
    drawing.arrow((165, 272), (165, 222), (326, 222), (326, 337), (384, 337))
    drawing.text(245, 208, "keys, values", size=15)
    drawing.arrow((485, 154), (485, 84))
    drawing.box(375, 48, 220, 34, "matrix, softmax")
    drawing.arrow((485, 48), (485, 26))
    drawing.text(485, 14, "probabilities of the next word")
    return Diagram(
        drawing.svg(),
        "To be read from below. An arrow around a part is a residual connection: + adds what went "
        "in to what comes out, and norm normalises the sum.",
    )


def _part(drawing: Drawing, x: float, y: float, name: str, outside: int) -> None:
    """Draws a part of a block, its normalisation above, and the way around it on one side."""
    tone = {"feed-forward": 3, "cross-attention": 2}.get(name, 1)
    drawing.box(x - 100, y, 200, 34, name, tone=tone)
    drawing.box(x - 60, y - 48, 120, 32, "+, norm")
    drawing.arrow((x, y), (x, y - 16))
    side = x + 128 * outside
    drawing.arrow((x, y + 46), (side, y + 46), (side, y - 32), (x + 60 * outside, y - 32))
