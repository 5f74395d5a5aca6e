"""Times competitors alternately, round after round, in one process."""

import statistics
import time

from experiments.benchmark.peers import Runnable


MIN_ROUNDS = 3
# Seconds between turns: idle worker threads of one library spin for a while and disturb the next
# competitor, and memory freed by a long run is still being cleared.
SETTLE, LONGEST_SETTLE = 0.01, 0.3
TURN = 0.03  # seconds; short runs are repeated within a turn
WARM = 1.0  # seconds; shorter first runs pay for memory freed by the previous competitor


def timed(competitor: Runnable) -> float:
    """Returns the seconds of a run."""
    start = time.perf_counter()
    competitor.run()
    return time.perf_counter() - start


def _turn(competitor: Runnable, previous: float) -> list[float]:
    """Returns the seconds of each run in a turn, after a run that took `previous` seconds. The
    first run warms up caches and counts only if it is long."""
    time.sleep(min(LONGEST_SETTLE, max(SETTLE, previous / 4)))
    first = timed(competitor)
    times = [first] if first >= WARM else []
    while sum(times) < TURN:
        times.append(timed(competitor))
    return times


def in_turn(competitors: dict[str, Runnable], seconds: float) -> tuple[dict[str, float], int]:
    """Runs competitors alternately for about `seconds`; returns the median milliseconds of each,
    and the number of rounds."""
    for competitor in competitors.values():
        competitor.run()
    times: dict[str, list[float]] = {name: [] for name in competitors}
    stop, rounds, last = time.perf_counter() + seconds, 0, 0.0
    while rounds < MIN_ROUNDS or time.perf_counter() < stop:
        rounds += 1
        for name, competitor in competitors.items():
            times[name] += _turn(competitor, previous=last)
            last = times[name][-1]
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}, rounds
