"""Rules about links: a link carries one message at a time, in the order in which its device sends them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.check.facts import Facts
from pipeplan.check.programs import Messages, Programs
from pipeplan.check.report import Findings
from pipeplan.model import Hop

__all__ = ["Links", "check_links"]

Sent = tuple[int, int]
"""A message: the number of its hop, and its own among those of the hop."""


@dataclass(frozen=True, slots=True)
class Links:
    """The messages that occupy links, and when they do.

    ``orders`` has for each link (source device, target device) its messages in the order of the SENDs. ``begins`` has
    when each takes its link, in ns: as soon as it is made and those before it are through. ``hops`` [operation] are the
    numbers of such hops that bring it something, ``ends`` {hop: (source operation, target operation)}.
    """

    messages: Messages
    orders: dict[tuple[int, int], list[Sent]]
    begins: dict[Sent, int]
    hops: list[list[int]]
    ends: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, facts: Facts, messages: Messages, programs: Programs) -> Links:
        """Go through the programs, which are complete."""
        links = cls(messages, defaultdict(list), {}, [[] for _ in facts.ids], {})
        for number, (_, _, dependency, hop) in enumerate(messages.hops):
            if hop.occupancy_ns:
                links.ends[number] = facts.position[dependency.source], facts.position[dependency.target]
                links.hops[facts.position[dependency.target]].append(number)
        for device, entries in enumerate(programs.entries if links.ends else []):
            links._send(facts, device, entries)
        return links

    def _send(self, facts: Facts, device: int, entries: list[Sent]) -> None:
        """Take the SENDs of one device."""
        free: defaultdict[int, int] = defaultdict(int)
        for entry, message in entries:
            number = entry - len(facts.ids)
            if number not in self.ends or self.messages.hops[number][3].source_device != device:
                continue
            hop = self.hop(number, message)
            self.orders[device, hop.target_device].append((number, message))
            self.begins[number, message] = max(free[hop.target_device], self.made(facts, number, message))
            free[hop.target_device] = self.begins[number, message] + hop.occupancy_ns

    def hop(self, number: int, message: int) -> Hop:
        """What a message takes, as a hop: a part of a micro-batch occupies the link half as long."""
        hop = self.messages.hops[number][3]
        return hop.part if message < 2 * self.messages.slots[number].num_parted else hop

    def made(self, facts: Facts, number: int, message: int) -> int:
        """When everything that a message carries is made, in ns."""
        source = self.ends[number][0]
        samples = self.messages.slots[number].samples(message)
        return max(facts.end(source, n) for n in facts.slots[source].sharing(samples))

    def arrival(self, number: int, message: int) -> int:
        """When a message is there, in ns."""
        return self.begins[number, message] + self.hop(number, message).duration_ns

    def incoming(self, facts: Facts, target: int, action: int) -> Iterator[Sent]:
        """The messages that come to an action over these links."""
        samples = facts.slots[target].samples(action)
        for number in self.hops[target]:
            for message in self.messages.slots[number].sharing(samples):
                yield number, message

    def last_arrival(self, facts: Facts, target: int, action: int) -> int:
        """When everything is there that comes to an action over these links, in ns; 0 if nothing does."""
        return max((self.arrival(*sent) for sent in self.incoming(facts, target, action)), default=0)

    def copy(self, link: tuple[int, int], begins: list[int], unroll: int) -> dict[Sent, int] | None:
        """The link's part of a repetend that has its operations from micro-batches ``begins`` [operation] on.

        That is a contiguous run of its messages, in which each hop occurs ``unroll`` times; the last such run
        in which no message is before what makes it, or behind what waits for it. {(hop, micro-batch): the
        micro-batch's number in the run, by hop}, in order; None if there is none.
        """
        named = [(number, self.messages.slots[number].name(message)) for number, message in self.orders[link]]
        order = [(number, microbatch) for number, (microbatch, part) in named if part != 1]  # parts are before it
        low = {number: begins[self.ends[number][1]] for number, _ in order}
        high = {number: begins[self.ends[number][0]] for number, _ in order}
        for at in reversed(range(sum(low.values()), sum(high.values()) + 1)):
            before = Counter(number for number, _ in order[:at])
            run = order[at : at + unroll * len(low)]
            if (
                all(low[number] <= before[number] <= high[number] for number in low)
                and all(m < before[number] for number, m in order[:at])
                and set(run) == {(number, before[number] + u) for number in low for u in range(unroll)}
            ):
                return {(number, m): m - before[number] for number, m in run}
        return None


def check_links(facts: Facts, links: Links, findings: Findings) -> None:
    """No action starts before a message is there that had to wait for its link.

    Whether it would be there over a free link is another rule's (inputs).
    """
    for target, starts in enumerate(facts.starts if links.ends else []):
        for action, start in enumerate(starts):
            for sent in links.incoming(facts, target, action):
                number, hop = sent[0], links.hop(*sent)
                if links.made(facts, *sent) + hop.duration_ns <= start < links.arrival(*sent):
                    text = (
                        f"starts at {start} ns, but {links.messages.text(*sent, send=True)} gets the link from "
                        f"device {hop.source_device} to {hop.target_device} at {links.begins[sent]} ns, after "
                        f"others, and arrives at {links.arrival(*sent)} ns ({links.messages.place(number)})"
                    )
                    findings.add("links", f"starts_ns[{facts.ids[target]}][{action}]", text)
