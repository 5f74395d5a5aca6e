"""The engine: it gives requests rows of the caches and pages, and runs the compiled step.

A thread of its own repeats three things: it admits waiting requests, in order, while a row and the
pages for a request's prompt and longest answer are free; it runs a step, in which rows read their
prompts while others write; and it delivers the tokens. Pages are free again as soon as a request
has ended or was abandoned.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx

from experiments.language.serving.step import Draws, StepInputs, run_step
from experiments.runs.ending import one_line
from jattn.cache import PagedCache
from jattn.nn import DecoderOnly


PAGE_SIZE = 16  # tokens of a page
CHUNK = 32  # tokens of a prompt that a row reads in one step


class Refused(Exception):
    """The engine does not take a request, for a reason that is no fault of the request."""


class Event(NamedTuple):
    """News of a request: its next token, its end, or both; nothing follows its end.

    Attributes:
        token: the next token, or None.
        finish: "stop" after a stop token, "length" after `max_tokens` tokens; None before the end,
            and for errors.
        error: why the request ended without an answer, or None.
    """

    token: int | None = None
    finish: Literal["stop", "length"] | None = None
    error: str | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and arguments of `jattn.generate`, with a seed in place of a key."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: frozenset[int] = frozenset()

    @property
    def pages(self) -> int:
        """The number of pages that the prompt and the longest answer need. The last token is never
        read by the model."""
        return num_pages(len(self.prompt) + self.max_tokens - 1)


def num_pages(tokens: int) -> int:
    """Returns the number of pages that tokens need."""
    return -(-tokens // PAGE_SIZE)


@dataclass(eq=False)
class Job:
    """A request that waits or has a row.

    Attributes:
        request: what to generate.
        deliver: receives the events, in the engine's thread.
        key: the data of the request's random key.
        unread: the tokens that the model reads next.
        written: the number of tokens generated.
        outcome: why the request has ended: "stop", "length", "abandoned" or an error; else None.
    """

    request: GenerationRequest
    deliver: Callable[[Event], object]
    key: np.ndarray = field(init=False)
    unread: tuple[int, ...] = field(init=False)
    written: int = 0
    outcome: str | None = None

    def __post_init__(self) -> None:
        self.key = np.asarray(jax.random.key_data(jax.random.key(self.request.seed)))
        self.unread = self.request.prompt

    @property
    def ended(self) -> bool:
        """Whether the last event was delivered, or nobody waits for it."""
        return self.outcome is not None


@functools.lru_cache(maxsize=4)
def _compiled_step(definition: nnx.GraphDef) -> Any:
    """Returns the compiled step of a model. If the definition were a static argument, every step
    would compare it, which takes most of a millisecond."""
    return jax.jit(functools.partial(run_step, definition), donate_argnums=1)


class Engine:
    """Generates for up to `rows` requests at once, each of at most `length` tokens with its prompt.

    Args:
        model: the language model.
        rows: the number of requests at once.
        length: the most tokens of a request, those of its prompt included.
        pages: the number of pages of all requests together, by default as many as the longest ones
            need.
        waiting: the most requests that wait for a row.
        cache_dtype: the dtype of keys and values in the caches, by default the model's.

    Raises ValueError if one request of `length` tokens needs more pages than there are.
    """

    def __init__(
        self,
        model: DecoderOnly,
        *,
        rows: int,
        length: int,
        pages: int | None = None,
        waiting: int = 64,
        cache_dtype: str | None = None,
    ):
        per_row = num_pages(length)
        self.pages = rows * per_row if pages is None else pages
        if self.pages < per_row:
            raise ValueError(
                f"pages: expected at least {per_row}, as a request of {length} tokens needs, "
                f"got {pages}"
            )
        self.length, self.rows, self.max_waiting = length, rows, waiting
        self.tokens_served = 0
        self.failure: str | None = None
        options: Any = {"page_size": PAGE_SIZE, "num_pages": self.pages}
        self._caches: Any = model.start(rows, length, PagedCache, cache_dtype, **options)
        definition, self._variables = nnx.split(model)
        self._step = _compiled_step(definition)
        self._key_shape = jax.random.key_data(jax.random.key(0)).shape
        self._jobs: list[Job | None] = [None] * rows
        self._reset = np.zeros(rows, bool)  # rows whose tokens the next step removes
        self._waiting: deque[Job] = deque()
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Compiles the step for prompts and the one for single tokens, and starts the thread."""
        for T in (CHUNK, 1):
            self._advance(self._inputs([None] * self.rows, T))
        self._thread.start()

    def submit(self, request: GenerationRequest, deliver: Callable[[Event], object]) -> Job:
        """Queues a request, whose events `deliver` receives in the engine's thread.

        Raises:
            ValueError: the request is longer than `length`.
            Refused: the queue is full, or the engine has stopped.
        """
        tokens = len(request.prompt) + request.max_tokens
        if tokens > self.length:
            raise ValueError(
                f"max_tokens: expected at most {self.length} tokens with the prompt, got {tokens}, "
                f"{len(request.prompt)} of the prompt and {request.max_tokens} to generate"
            )
        job = Job(request, deliver)
        with self._changed:
            if self._stopping:
                raise Refused(self.failure or "the server is stopping")
            if len(self._waiting) >= self.max_waiting:
                raise Refused(f"{self.max_waiting} requests are waiting already; try again later")
            self._waiting.append(job)
            self._changed.notify()
        return job

    def abandon(self, job: Job) -> None:
        """Ends a job whose events nobody reads any more; its pages are free before the next step.
        Does nothing to a job that has ended."""
        with self._changed:
            job.outcome = job.outcome or "abandoned"
            if job in self._waiting:
                self._waiting.remove(job)
            self._changed.notify()

    def stop(self) -> None:
        """Ends all requests with an error, and the thread after its current step."""
        self._end_all("the server is stopping")
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_stopping(self) -> bool:
        """Whether the engine takes no more requests."""
        return self._stopping

    def counts(self) -> dict[str, int]:
        """Returns the numbers of active and waiting requests, of free pages, and of tokens
        generated so far."""
        with self._changed:
            return {
                "active": len(self._active()),
                "waiting": len(self._waiting),
                "free_pages": self._free_pages(),
                "tokens_served": self.tokens_served,
            }

    def _active(self) -> list[Job]:
        """Returns the jobs that have a row and have not ended."""
        return [job for job in self._jobs if job is not None and not job.ended]

    def _free_pages(self) -> int:
        return self.pages - sum(job.request.pages for job in self._active())

    def _run(self) -> None:
        try:
            while (jobs := self._scheduled()) is not None:
                T = CHUNK if any(job and len(job.unread) > 1 for job in jobs) else 1
                self._deliver(jobs, self._advance(self._inputs(jobs, T)), T)
        except Exception as error:  # whatever it is, nobody may wait for an answer in vain
            self.failure = f"the engine failed: {one_line(error) or type(error).__name__}"
            self._end_all(self.failure)

    def _scheduled(self) -> list[Job | None] | None:
        """Waits for work and returns the job of each row; None when the engine stops."""
        with self._changed:
            while not self._stopping:
                for row, job in enumerate(self._jobs):
                    if job is not None and job.ended:
                        self._jobs[row], self._reset[row] = None, True
                self._admit()
                if any(self._jobs) or self._reset.any():
                    return self._jobs.copy()
                self._changed.wait()
        return None

    def _admit(self) -> None:
        """Gives rows to waiting jobs in their order, as long as rows and pages are free."""
        while self._waiting and None in self._jobs:
            if self._waiting[0].request.pages > self._free_pages():
                return
            self._jobs[self._jobs.index(None)] = self._waiting.popleft()

    def _inputs(self, jobs: list[Job | None], T: int) -> StepInputs:
        """Returns the inputs of a step for the job of each row."""
        R = len(jobs)
        draws = Draws(
            np.zeros((R, *self._key_shape), np.uint32),
            np.zeros(R, np.int32),
            np.zeros(R, np.float32),
            np.full(R, np.iinfo(np.int32).max, np.int32),
            np.ones(R, np.float32),
            np.zeros(R, bool),
        )
        tokens, counts = np.zeros((R, T), np.int32), np.zeros(R, np.int32)
        for row, job in enumerate(jobs):
            if job is None:
                continue
            request, part = job.request, job.unread[:T]
            tokens[row, : len(part)], counts[row] = part, len(part)
            draws.keys[row], draws.places[row] = job.key, job.written
            draws.temperature[row] = request.temperature
            if request.top_k is not None:
                draws.top_k[row] = request.top_k
            if request.top_p is not None:
                draws.top_p[row] = request.top_p
            draws.by_rank[row] = request.top_k is not None or request.top_p is not None
        reset, self._reset = self._reset, np.zeros(R, bool)
        return StepInputs(tokens, counts, reset, draws)

    def _advance(self, inputs: StepInputs) -> np.ndarray:
        """Runs a step and returns the token that follows in each row."""
        tokens, self._caches = self._step(self._variables, self._caches, inputs)
        return np.asarray(tokens)

    def _deliver(self, jobs: list[Job | None], tokens: np.ndarray, T: int) -> None:
        """Delivers the tokens of rows whose prompts are read, and ends those that are complete."""
        with self._changed:
            for job, token in zip(jobs, tokens.tolist(), strict=True):
                if job is None or job.ended:
                    continue
                job.unread = job.unread[T:]
                if job.unread:
                    continue
                event = self._event(job, token)
                job.unread, job.written = (token,), job.written + 1
                job.outcome = event.finish or event.error
                self.tokens_served += event.error is None
                job.deliver(event)

    def _event(self, job: Job, token: int) -> Event:
        if token < 0:
            return Event(
                error="the model gives no probabilities (NaN); its training has diverged, or its "
                "parameters are damaged"
            )
        if token in job.request.stop:
            return Event(token, "stop")
        return Event(token, "length" if job.written + 1 == job.request.max_tokens else None)

    def _end_all(self, reason: str) -> None:
        """Ends all requests with an error, and takes no more."""
        with self._changed:
            self._stopping = True
            for job in [*self._active(), *self._waiting]:
                job.outcome = reason
                job.deliver(Event(error=reason))
            self._waiting.clear()
            self._changed.notify()
