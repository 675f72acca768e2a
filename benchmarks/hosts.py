"""Several hosts on one machine: network namespaces joined by virtual links, and torchrun in each.

    python benchmarks/hosts.py                                # prints the table of docs/benchmarks/runs.md; needs root
    python benchmarks/hosts.py --what cut --hosts 4

Each host is a namespace with one interface; all are joined by a bridge in a namespace of its own. What a host sends is
limited by ``tc tbf``. Latency is ``netem``'s where the kernel has it; elsewhere a relay stands in for the bridge, which
holds every frame back for so long.

*losses*: a model trained on several hosts has the losses that it has on one. *times*: blocks that take 20 ms forward
and 40 backward, and messages of 15 ms each way, a third of the 90 ms of a micro-batch: the iteration beside the
predicted one, with links as they are limited, and as ``pipeplan profile --communication`` measures them between the
hosts. *cut*: a host that is cut off in mid-run, the last one, or the first, where ranks meet; how long the others take
to end, and what they say.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import re
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tables import machine, markdown, note

NETWORK, MTU, PORT = "10.99.0", 9000, 29500
RELAY, CHECKSUMS = "--relay", "--checksums"
BURST = MTU + 100
"""Bytes that a host may send at once."""


def hindrance() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 are not installed"
    probe = f"pipeplan-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no namespace can be made: {made.stderr.strip()}"
    _command("ip", "netns", "del", probe)
    return ""


def _command(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


@dataclass(slots=True)
class Hosts:
    """``count`` hosts with links of so many bytes a second, if that is limited, and a latency in seconds.

    Entering makes them, leaving removes them with all that runs there.
    """

    count: int
    bytes_per_s: int | None = None
    latency_s: float = 0.0
    names: list[str] = field(init=False)
    _relay: subprocess.Popen[bytes] | None = None
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = [f"pipeplan-{os.getpid()}-{number}" for number in range(self.count)]

    @property
    def _middle(self) -> str:
        return f"pipeplan-{os.getpid()}-net"

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def address(self, number: int) -> str:
        """Of a host."""
        return f"{NETWORK}.{number + 1}"

    def start(self, number: int, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a command on a host, which prints into a file."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        with output.open("wb") as file:
            named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[number]]
            words = ["ip", "netns", "exec", self.names[number], *named, *command]
            self._started.append(subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment))
        return self._started[-1]

    def cut(self, number: int) -> None:
        """Take a host off the network."""
        _command("ip", "-n", self.names[number], "link", "set", "eth0", "down")

    def _make(self) -> None:
        _command("ip", "netns", "add", self._middle)
        delayed = self.latency_s > 0
        relayed = delayed and not self._has_netem()
        if not relayed:
            _command("ip", "-n", self._middle, "link", "add", "bridge", "type", "bridge")
            _command("ip", "-n", self._middle, "link", "set", "bridge", "mtu", MTU, "up")
        for number, name in enumerate(self.names):
            port = f"port{number}"
            _command("ip", "netns", "add", name)
            ends = ("eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self._middle)
            _command("ip", "link", "add", *ends)
            for where, end in ((name, "eth0"), (self._middle, port)):
                _command("ip", "-n", where, "link", "set", end, "mtu", MTU, "gso_max_segs", 1, "up")
            _command("ip", "-n", name, "link", "set", "lo", "up")
            _command("ip", "-n", name, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            if relayed:
                _command("ip", "netns", "exec", name, sys.executable, __file__, CHECKSUMS)
            else:
                _command("ip", "-n", self._middle, "link", "set", port, "master", "bridge")
            if delayed and not relayed:
                _command("tc", "-n", self._middle, "qdisc", "add", "dev", port, "root", "netem", "delay", self._delay)
            if self.bytes_per_s is not None:
                rate = ("rate", f"{8 * self.bytes_per_s}bit", "burst", BURST, "latency", "10s")
                _command("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
        if relayed:
            words = [sys.executable, __file__, RELAY, str(self.count), str(self.latency_s)]
            self._relay = subprocess.Popen(["ip", "netns", "exec", self._middle, *words])

    @property
    def _delay(self) -> str:
        return f"{1e6 * self.latency_s:.0f}us"

    def _has_netem(self) -> bool:
        words = ["tc", "-n", self._middle, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def _remove(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for name in (*self.names, self._middle):
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for process in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), 9)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        for each in self._started:
            each.wait()


_ETHTOOL, _SET_CHECKSUMS = 0x8946, 0x17
"""A request to a network device, and what it is for (linux/ethtool.h)."""


def write_checksums() -> None:
    """Have this host's interface send frames with their checksums, which links within a kernel leave out."""
    value = ctypes.create_string_buffer(struct.pack("II", _SET_CHECKSUMS, 0))
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _ETHTOOL, struct.pack("16sP", b"eth0", ctypes.addressof(value)))


def relay(count: int, latency_s: float) -> None:
    """Pass frames on between ports, each after so long; who is where is learnt from what comes."""
    ports = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) for _ in range(count)]
    for number, port in enumerate(ports):
        port.bind((f"port{number}", 0))
        port.setblocking(False)
    known: dict[bytes, int] = {}
    waiting: list[tuple[float, int, int, bytes]] = []
    order = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            *_, target, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a host that is cut off
                ports[target].send(frame)
        left = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        for ready in select.select(ports, [], [], left)[0]:
            source = ports.index(ready)
            with contextlib.suppress(BlockingIOError, OSError):
                while True:
                    frame, (_, _, kind, *_) = ready.recvfrom(MTU + 64)
                    if kind == socket.PACKET_OUTGOING:
                        continue
                    known[frame[6:12]] = source
                    there = known.get(frame[:6])
                    for target in range(count) if there is None else (there,):
                        if target != source:
                            order += 1
                            heapq.heappush(waiting, (time.monotonic() + latency_s, order, target, frame))


# Runs -------------------------------------------------------------------------------------------------------------


def start_on(hosts: Hosts, folder: Path, *command: str) -> list[subprocess.Popen[bytes]]:
    """Start a command under torchrun, one rank on each host; what a host prints is in ``folder``/NUMBER."""
    first = ("--nproc-per-node", "1", "--master-addr", hosts.address(0), "--master-port", str(PORT))
    return [
        hosts.start(
            number,
            (
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts.count)),
                *("--node-rank", str(number), *first, "-m", "pipeplan", *command),
            ),
            folder / str(number),
        )
        for number in range(hosts.count)
    ]


def printed_by(processes: Sequence[subprocess.Popen[bytes]], folder: Path, timeout_s: float = 240.0) -> str:
    """What the first host has printed, when all have ended well. Raises RuntimeError."""
    until = time.monotonic() + timeout_s
    codes = [process.wait(max(1.0, until - time.monotonic())) for process in processes]
    said = [(folder / str(number)).read_text() for number in range(len(processes))]
    if any(codes):
        raise RuntimeError(f"hosts ended with {codes}:\n" + "\n".join(said))
    return said[0]


def pipeplan(*words: object) -> str:
    """What a command prints, here."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeplan", *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"pipeplan {' '.join(map(str, words))}\n{done.stderr}")
    return done.stdout


def model_plan(folder: Path, count: int) -> str:
    """A pipeline of a small model, one stage on each device."""
    profile, plan = folder / "tiny.json", folder / "plan.json"
    pipeplan(
        "profile",
        "gpt2-tiny",
        "--estimate",
        "--device",
        "v100-16gb",
        "--dtype",
        "float32",
        "--microbatch",
        "1,2",
        "-o",
        profile,
    )
    sizes = ("--devices", count, "--placement", "one-to-one", "--dp", 1, "--pp", count, "--mini-batch", 8)
    pipeplan("search", profile, *sizes, "--scheduler", "1f1b", "--precision", "fp32", "-o", plan)
    return str(plan)


IN_FLOAT64 = ("--model", "gpt2-tiny", "--dtype", "float64", "--steps", "3", "--json")


def losses(count: int) -> dict[str, list[float]]:
    """Of a training on one host, and on several."""
    with tempfile.TemporaryDirectory() as given:
        plan = model_plan(Path(given), count)
        here = json.loads(pipeplan("run", plan, "--local", *IN_FLOAT64))
        return {"one": losses_of(here), "several": losses_of(json.loads(train_on(count, plan).splitlines()[-1]))}


def train_on(count: int, plan: str) -> str:
    """What the first of several hosts prints of the same training with this plan, the figures last."""
    with tempfile.TemporaryDirectory() as given, Hosts(count) as hosts:
        folder = Path(given)
        return printed_by(start_on(hosts, folder, "run", plan, *IN_FLOAT64), folder)


def losses_of(found: Mapping[str, Any]) -> list[float]:
    return [step["loss"] for step in found["steps"]]


BLOCK_MS, MESSAGE_MS, BYTES_PER_S = 20.0, 15.0, 13_000_000


SIZES = ("--min-bytes", "64KiB", "--max-bytes", "1MiB")
"""Of messages that are measured: a third to five times those of the run."""


def times(count: int, latency_s: float, steps: int, *, measured: bool) -> dict[str, float]:
    """Predicted and measured iterations in ms, whose messages take a third of a micro-batch.

    With links that are ``measured`` first, or as they are limited.
    """
    size = round(1e-3 * MESSAGE_MS * BYTES_PER_S - latency_s * BYTES_PER_S)
    with tempfile.TemporaryDirectory() as given, Hosts(count, BYTES_PER_S, latency_s) as hosts:
        folder = Path(given)
        profile, cluster, plan = (folder / name for name in ("p.json", "c.json", "plan.json"))
        shape = ("--devices", count, "--chunks", 1, "--forward", f"{BLOCK_MS}ms", "--backward", f"{2 * BLOCK_MS}ms")
        pipeplan("example", "shape-circular", *shape, "--bytes", f"{size}B", "-o", profile)
        cluster.write_text(json.dumps(cluster_of(count, latency_s)))
        if measured:
            words = (
                "profile",
                "--communication",
                *SIZES,
                "--cluster",
                str(cluster),
                "-o",
                str(folder / "measured.json"),
            )
            printed_by(start_on(hosts, folder, *words), folder)
            cluster = folder / "measured.json"
        pipeplan("search", profile, "--cluster", cluster, "--microbatches", 8, "--scheduler", "1f1b", "-o", plan)
        how = ("--emulate", "--stretch", "1", "--message-limit", "1GB", "--steps", str(steps), "--json")
        found = json.loads(printed_by(start_on(hosts, folder, "run", str(plan), *how), folder).splitlines()[-1])
    taken = [step["iteration_ns"] / 1e6 for step in found["steps"]][1:]
    return {"predicted": found["predicted_iteration_ns"] / 1e6, "measured": statistics.median(taken)}


def cluster_of(count: int, latency_s: float) -> Mapping[str, object]:
    """The hosts, as a cluster of one device each."""
    level = {
        "name": "wire",
        "group_size": count,
        "bandwidth_bytes_per_s": BYTES_PER_S,
        "latency_ns": round(1e9 * latency_s),
    }
    return {
        "schema_version": 2,
        "kind": "cluster",
        "name": "hosts",
        "source": {"method": "estimated"},
        "devices": [{"name": "core", "count": count, "memory_bytes": 10**12}],
        "levels": [level],
    }


@dataclass(frozen=True, slots=True)
class Cut:
    """How hosts ended: the ``name`` of the one that was cut off, seconds from then until one ``named`` it and to the
    last one's end, exit codes, and what those said that were left.
    """

    name: str
    named: float
    seconds: float
    codes: list[int]
    said: str


def cut(count: int, timeout_s: float = 5.0, number: int = -1) -> Cut:
    """Cut one of the hosts off, by default the last, when the first steps have ended."""
    with tempfile.TemporaryDirectory() as given, Hosts(count) as hosts:
        folder = Path(given)
        plan = model_plan(folder, count)
        how = ("--model", "gpt2-tiny", "--steps", "100000", "--timeout", f"{timeout_s:g}s")
        processes = start_on(hosts, folder, "run", plan, *how)
        _until_steps(folder / "0", processes)
        hosts.cut(number % count)
        begin = time.monotonic()
        left = [host for host in range(count) if host != number % count]
        named: list[float] = []
        while any(processes[host].poll() is None for host in left) and time.monotonic() < begin + 240:
            named += [time.monotonic() - begin] * bool(_said_by(folder, left))
            time.sleep(0.02)
        codes = [processes[host].wait(1) for host in left]
        seconds = time.monotonic() - begin
        said, name = "; ".join(_said_by(folder, left)), hosts.names[number]
    return Cut(name, next(iter(named), seconds), seconds, codes, said)


def _said_by(folder: Path, hosts: Sequence[int]) -> list[str]:
    """What hosts have said of how they ended."""
    said = "".join((folder / str(host)).read_text() for host in hosts)
    return re.findall(r"^pipeplan: ((?:nothing|rank) .*)", said, re.MULTILINE)


def _until_steps(output: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + 240
    while not output.exists() or b"\nstep 2 " not in output.read_bytes():
        if time.monotonic() > until or any(process.poll() is not None for process in processes):
            raise RuntimeError(f"no steps: {output.read_text() if output.exists() else ''}")
        time.sleep(0.1)


# ------------------------------------------------------------------------------------------------------------------


def rows(what: str, counts: Sequence[int], given: argparse.Namespace) -> Iterator[list[str]]:
    for count in counts:
        if what == "losses":
            both = losses(count)
            apart = max(abs(a - b) for a, b in zip(both["one"], both["several"], strict=True))
            yield ["losses", str(count), "", f"differ by {apart:.0e}"]
        elif what == "times":
            for latency_s, measured in itertools.product((0.0, 1e-3), (False, True)):
                found = times(count, latency_s, given.steps, measured=measured)
                ratio = found["measured"] / found["predicted"] - 1
                told = f"{found['measured']:.1f} ms, predicted {found['predicted']:.1f} ({ratio:+.1%})"
                yield [
                    "times",
                    str(count),
                    f"{BYTES_PER_S / 1e6:.0f} MB/s, {1e3 * latency_s:.0f} ms" + ", measured" * measured,
                    told,
                ]
        else:
            for which, number in (("the last", -1), ("the first", 0)):
                ended = cut(count, number=number)
                told = f"named after {ended.named:.1f} s, ended after {ended.seconds:.1f} s, codes {ended.codes}"
                told += f": {ended.said}"
                yield ["cut", str(count), f"{which} one, --timeout 5s", told]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("losses", "times", "cut"))
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--steps", type=int, default=12, help="of times, the first of which is left out")
    given = parser.parse_args()
    if found := hindrance():
        sys.exit(found)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # not without removing hosts
    table: list[list[str]] = []
    for what in (given.what,) if given.what else ("losses", "times", "cut"):
        for row in rows(what, [int(each) for each in given.hosts.split(",")], given):
            note(" ".join(row))
            table.append(row)
    print(markdown(["what", "hosts", "links", "found"], table))
    print(f"\n{machine()}.")


if __name__ == "__main__":
    if sys.argv[1:2] == [RELAY]:
        relay(int(sys.argv[2]), float(sys.argv[3]))
    elif sys.argv[1:] == [CHECKSUMS]:
        write_checksums()
    else:
        main()
