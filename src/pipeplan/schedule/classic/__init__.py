"""The classic schedules: rules files of the catalog, or a few lines on a common base.

Here: the table of all of them by name, and those that no rules file says. Not here: rules (rules) and their engine.
"""

from __future__ import annotations

from pipeplan.partition import STRATEGIES
from pipeplan.schedule.classic import shared, v_shape, zero_bubble
from pipeplan.schedule.classic.base import Classic, all_of, as_given, is_chain, is_split, one_stage_each, scripted
from pipeplan.schedule.classic.ruled import by_rules, by_rules_in_units
from pipeplan.schedule.stage_graph import best_kfkb_orders, greedy_orders

__all__ = ["CLASSIC", "Classic"]


_down, _zigzag = STRATEGIES["circular"].positions, STRATEGIES["v-shape"].positions
_one = is_chain(_down, "stage d on device d alone (--placement one-to-one)", chunks="one")
_circular = is_chain(_down, "several stages per device in turn (--placement circular)", chunks="several")
_v_shape = is_chain(_zigzag, "two stages per device, down and up (--placement v-shape)", chunks="two")
_waves = is_chain(_zigzag, "stages down and up, an even number per device (--placement v-shape)", chunks="even")

CLASSIC: dict[str, Classic] = {
    "gpipe": Classic(lambda problem: None, by_rules("gpipe")),
    "1f1b": Classic(_one, by_rules("1f1b")),
    "zb-h1": Classic(all_of(_one, is_split), by_rules("zb-h1")),
    "zb-h2": Classic(all_of(_one, is_split), by_rules("zb-h2")),
    "zb-1p": Classic(all_of(_one, is_split), zero_bubble.automatic(1), automatic=True),
    "zb-2p": Classic(all_of(_one, is_split), zero_bubble.automatic(2), automatic=True),
    "zb-auto": Classic(all_of(_one, is_split), zero_bubble.automatic(None), automatic=True),
    "interleaved-1f1b": Classic(_circular, by_rules("interleaved-1f1b")),
    "interleaved-zb": Classic(all_of(_circular, is_split), by_rules("interleaved-zb")),
    "looped-bfs": Classic(_circular, by_rules("looped-bfs")),
    "zb-v": Classic(all_of(_v_shape, is_split), scripted(v_shape.zero_bubble_v)),
    "v-half": Classic(all_of(_v_shape, is_split), v_shape.repeated_block((2, 1, 2, 1)), automatic=True),
    "v-min": Classic(all_of(_v_shape, is_split), v_shape.repeated_block((1, 1, 1, 1)), automatic=True),
    "dualpipe-v": Classic(all_of(_v_shape, v_shape.enough_for_dualpipe), scripted(v_shape.dualpipe_v)),
    "hanayo": Classic(_waves, by_rules_in_units("hanayo")),
    "chimera": Classic(shared.needs_two_ways, by_rules("chimera")),
    "kfkb": Classic(one_stage_each, as_given(best_kfkb_orders)),
    "greedy": Classic(lambda problem: None, as_given(greedy_orders)),
    "1f1b+": Classic(shared.needs_shared, by_rules("1f1b+")),
}
"""Every classic schedule by the name ``--scheduler`` takes."""
