"""Turns: what is compared runs one after another, round after round, in one process."""

import statistics
import time

from experiments.benchmark.peers import Runnable


MIN_ROUNDS = 3
# Seconds between turns: idle worker threads of one library spin for a while and disturb the next,
# and memory that a long run has given back is still being cleared.
SETTLE, LONGEST_SETTLE = 0.01, 0.3
TURN = 0.03  # seconds; short runs are repeated within a turn
WARM = 1.0  # seconds; shorter first runs pay for memory that the one before has given back


def _timed(one: Runnable) -> float:
    start = time.perf_counter()
    one.run()
    return time.perf_counter() - start


def _turn(one: Runnable, before: float) -> list[float]:
    """Seconds of each run in a turn, after a run that took `before`. The first warms caches up and
    counts only if it is long."""
    time.sleep(min(LONGEST_SETTLE, max(SETTLE, before / 4)))
    first = _timed(one)
    times = [first] if first >= WARM else []
    while sum(times) < TURN:
        times.append(_timed(one))
    return times


def in_turn(competitors: dict[str, Runnable], seconds: float) -> tuple[dict[str, float], int]:
    """The median milliseconds of each, taken in turn for about `seconds`, and how many rounds."""
    for one in competitors.values():
        one.run()
    times: dict[str, list[float]] = {name: [] for name in competitors}
    stop, rounds, last = time.perf_counter() + seconds, 0, 0.0
    while rounds < MIN_ROUNDS or time.perf_counter() < stop:
        rounds += 1
        for name, one in competitors.items():
            times[name] += _turn(one, before=last)
            last = times[name][-1]
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}, rounds
