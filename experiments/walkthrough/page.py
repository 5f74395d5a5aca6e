"""Writes the page: the text, diagrams, pictures, code and output of each step, in one HTML file."""

from collections.abc import Mapping, Sequence

from experiments.walkthrough import introduction
from experiments.walkthrough.diagrams import Diagram
from experiments.walkthrough.elements import (
    code_block,
    document,
    escape,
    fold,
    marked,
    paragraphs,
    picture,
)
from experiments.walkthrough.introduction import TITLE
from experiments.walkthrough.names import borrowed, preparation
from experiments.walkthrough.running import Result
from experiments.walkthrough.step import Step


def written(results: Sequence[Result]) -> str:
    """Returns the whole page as HTML.

    Args:
        results: the results of the steps, in order.
    """
    steps = [result.step for result in results]
    contents = "".join(
        f'<li><a href="#{escape(step.name)}">{escape(step.title)}</a></li>\n' for step in steps
    )
    sections = "".join(_section(steps, place, result) for place, result in enumerate(results))
    body = f"""<header>
<h1>{TITLE}</h1>
{paragraphs([introduction.SUMMARY])}{_diagram(introduction.OPENING)}</header>
<nav aria-label="steps">
<ol>
{contents}</ol>
</nav>
<main>
{_reading()}{sections}</main>
<section>
<h2>What comes next</h2>
{_ending(steps)}</section>
"""
    return document(TITLE, body)


def _reading() -> str:
    """Returns the section above the first step; what a reader may skip is folded."""
    documents = "".join(f"<li>{escape(text)}</li>\n" for text in introduction.texts())
    folded = {
        "install and run the steps": code_block(introduction.COMMANDS),
        "paste the code of a step": paragraphs(introduction.CODE)
        + _list(introduction.helpers(), "long"),
        "words and letters": paragraphs(introduction.WORDS) + _list(introduction.LETTERS, "short"),
        "the five texts that the steps follow": f"<ul>\n{documents}</ul>\n"
        + paragraphs([introduction.NUMBERS]),
    }
    folds = "".join(fold(summary, content) for summary, content in folded.items())
    return f"""<section>
<h2>Before the first step</h2>
{paragraphs(introduction.KNOWLEDGE)}{folds}</section>
"""


def _ending(steps: Sequence[Step]) -> str:
    """Returns the HTML below the last step."""
    names = ", ".join(f"`{step.name}`" for step in steps)
    return paragraphs(
        (
            "`python -m experiments.translation` trains a translator, and shows all of its heads.",
            "`python -m experiments.walkthrough` runs single steps if it is given their names, for "
            f"example `python -m experiments.walkthrough {steps[-1].name}`. The names are {names}.",
        )
    )


def _section(steps: Sequence[Step], place: int, result: Result) -> str:
    """Returns a step's HTML: text, diagram, pictures, code and output."""
    step = steps[place]
    name, title = escape(step.name), escape(step.title)
    diagram = _diagram(step.diagram) if step.diagram else ""
    pictures = "".join(
        picture(content, f"{step.title}: {description}")
        for content, description in zip(result.pictures, result.descriptions, strict=True)
    )
    misprints = fold("misprints in the texts", paragraphs(step.misprints)) if step.misprints else ""
    return f"""<section id="{name}">
<h2><a href="#{name}">{place + 1}. {title}</a></h2>
{paragraphs(step.paragraphs)}{diagram}{pictures}{_step_code(step)}
<p class="label">output, in {result.seconds:.1f} s</p>
<pre class="output" tabindex="0"><samp>{_output(result.output)}</samp></pre>
{misprints}<p class="follows">{_sources(steps, place)}</p>
</section>
"""


def _step_code(step: Step) -> str:
    """Returns the code of a step in the order of pasting; only its own lines are not folded."""
    prepared = preparation(step)
    others = [code for code in step.helpers if code.language != "python"]
    folded = "".join(fold(code.label, code_block(code)) for code in (*others, prepared))
    drawing = fold(step.drawing.label, code_block(step.drawing)) if step.drawing.text else ""
    label = f'<p class="label">{escape(step.lines.label)}</p>'
    return f"{folded}{label}\n{code_block(step.lines)}{drawing}"


def _sources(steps: Sequence[Step], place: int) -> str:
    """Lists the documents that a step follows, and the names that it uses from earlier steps."""
    step = steps[place]
    sentences = [f"{step.relation} {escape('; '.join(map(str, step.follows)))}."]
    for earlier, names in borrowed(steps, place).items():
        link = f'<a href="#{escape(steps[earlier].name)}">step {earlier + 1}</a>'
        listed = ", ".join(f"<code>{escape(name)}</code>" for name in names)
        sentences.append(f"From {link}: {listed}.")
    return "<br>\n".join(sentences)


def _list(meanings: Mapping[str, str], style: str) -> str:
    """Returns a list of code and meanings; on narrow screens, the "long" style puts each meaning on
    a line of its own."""
    pairs = (
        f"<dt><code>{escape(code)}</code></dt><dd>{marked(meaning)}</dd>\n"
        for code, meaning in meanings.items()
    )
    return f'<dl class="{style}">\n{"".join(pairs)}</dl>'


def _output(text: str) -> str:
    """Returns a step's output as HTML, with the checked claims coloured."""
    lines = (escape(line) for line in text.rstrip("\n").split("\n"))
    return "\n".join(
        f'<span class="good">{line}</span>' if line.startswith("✓") else line for line in lines
    )


def _diagram(diagram: Diagram) -> str:
    caption = f"<figcaption>{marked(diagram.caption)}</figcaption>"
    return f'<figure class="diagram">{diagram.svg}\n{caption}</figure>\n'
