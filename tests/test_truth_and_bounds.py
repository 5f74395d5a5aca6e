"""Mistakes in users' code about masks: `and` between masks, and wrong bounds."""

import numpy as np
import pytest

from jattn import masks, scores


@pytest.mark.parametrize("rule", [masks.Causal(), ~masks.Full(), scores.SoftCap(2.0)])
def test_rules_are_neither_true_nor_false(rule):
    for write in (lambda: rule and rule, lambda: rule or rule, lambda: not rule):
        with pytest.raises(TypeError, match="is None"):
            write()


def later(b, h, q, kv):
    return kv > q + 200


def test_bounds_that_lie_are_found():
    lying = masks.Predicate(later, bounds=lambda t: (t.columns.hi < 0, t.columns.hi < 0))
    with pytest.raises(ValueError, match="bounds"):
        masks.check_bounds(lying, 300, 300)


@pytest.mark.parametrize(
    ("bounds", "kind"),
    [
        (lambda t: t.columns.hi > 0, TypeError),
        (lambda t: (t.columns.hi, t.columns.hi), TypeError),
        (lambda t: (np.ones(7, bool), np.ones(7, bool)), ValueError),
    ],
)
def test_what_bounds_return_is_checked(bounds, kind):
    with pytest.raises(kind, match="bounds must return"):
        masks.tile_map(masks.Predicate(later, bounds=bounds), 300, 300, 100, 100)
