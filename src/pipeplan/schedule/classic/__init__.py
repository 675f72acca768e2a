"""The classic schedules, each a few lines on a common base."""

from __future__ import annotations

from pipeplan.schedule.classic import chain, shared, v_shape, zero_bubble
from pipeplan.schedule.classic.base import Classic, all_of, as_given, is_chain, is_split, one_stage_each, scripted
from pipeplan.schedule.stage_graph import best_kfkb_orders, greedy_orders

__all__ = ["CLASSIC", "Classic"]


def _down(num_devices: int, chunks: int) -> list[int]:
    return [stage % num_devices for stage in range(chunks * num_devices)]


def _zigzag(num_devices: int, chunks: int) -> list[int]:
    down = list(range(num_devices))
    return [device for chunk in range(chunks) for device in (down if chunk % 2 == 0 else down[::-1])]


_one = is_chain(_down, "stage d on device d alone", chunks="one")
_circular = is_chain(_down, "several stages per device in turn (--placement circular)", chunks="several")
_v_shape = is_chain(_zigzag, "two stages per device, down and up (--placement v-shape)", chunks="two")
_waves = is_chain(_zigzag, "stages down and up, an even number per device (--placement v-shape)", chunks="even")

CLASSIC: dict[str, Classic] = {
    "gpipe": Classic(lambda problem: None, chain.gpipe),
    "1f1b": Classic(_one, scripted(chain.one_forward_one_backward)),
    "zb-h1": Classic(all_of(_one, is_split), scripted(zero_bubble.handcrafted_h1)),
    "zb-h2": Classic(all_of(_one, is_split), scripted(zero_bubble.handcrafted_h2)),
    "zb-1p": Classic(all_of(_one, is_split), zero_bubble.automatic(1), automatic=True),
    "zb-2p": Classic(all_of(_one, is_split), zero_bubble.automatic(2), automatic=True),
    "zb-auto": Classic(all_of(_one, is_split), zero_bubble.automatic(None), automatic=True),
    "interleaved-1f1b": Classic(_circular, scripted(chain.interleaved)),
    "interleaved-zb": Classic(all_of(_circular, is_split), scripted(chain.interleaved_zero_bubble)),
    "looped-bfs": Classic(_circular, scripted(chain.looped_breadth_first)),
    "zb-v": Classic(all_of(_v_shape, is_split), scripted(v_shape.zero_bubble_v)),
    "v-half": Classic(all_of(_v_shape, is_split), v_shape.repeated_block((2, 1, 2, 1)), automatic=True),
    "v-min": Classic(all_of(_v_shape, is_split), v_shape.repeated_block((1, 1, 1, 1)), automatic=True),
    "dualpipe-v": Classic(all_of(_v_shape, v_shape.enough_for_dualpipe), scripted(v_shape.dualpipe_v)),
    "hanayo": Classic(_waves, v_shape.hanayo),
    "chimera": Classic(shared.needs_two_ways, shared.chimera_direct),
    "kfkb": Classic(one_stage_each, as_given(best_kfkb_orders)),
    "greedy": Classic(lambda problem: None, as_given(greedy_orders)),
    "1f1b+": Classic(shared.needs_shared, shared.one_forward_one_backward_plus),
}
"""Every classic schedule by the name ``--scheduler`` takes."""
