"""The data network of virtual hosts: a switch in user space that joins a TAP device of each and is as bad as it is told.

    switch.py '{"hosts": {"node1": PID, "node2": PID}, "device": "data0", "seed": 1}'

A host is the network namespace of a process. A frame waits for its turn on the sender's link (`rate`, with room for 128 kB
before it; what comes on top is dropped), then for `delay` and up to `jitter` more seconds, then for its turn on the
receiver's link, or it is lost with the probability `loss`. Frames from one host to another keep their order, as through a
cable. Orders come by standard input, one JSON object a line, and each is answered, once it is in force, with the frames
carried and lost:

    {"delay": 0.005, "jitter": 0.002, "loss": 0.01}      of all links
    {"host": "node2", "rate": 1e6}                       bits a second of one host's link, either way; null: no limit
    {"host": "node2", "sends": false, "receives": false} a cut link, in one direction or both
    {"pair": ["node1", "node3"], "joined": false}        two hosts that no longer hear each other

Why not the kernel's netem: it is a module that small kernels leave out (those of virtual machines for tests among them);
a second way for those would be a second thing to trust, and a switch can also cut a pair. Python is quick enough: some
20,000 frames a second. The end of standard input ends it, and its devices go with it.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
LONGEST_FRAME = 65536
LONGEST_QUEUE_BYTES = 1 << 17


def open_tap(pid, device):
    """A TAP device in the network namespace of a process, where this process then is."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns to the network of process {pid}")
    os.close(namespace)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return tap


class Port:
    """A host's end of its cable."""

    def __init__(self, name, tap):
        self.name, self.tap = name, tap
        self.rate, self.sends, self.receives = None, True, True
        self.free_at = {"up": 0.0, "down": 0.0}

    def passed(self, way, frame, arrival):
        """When a frame that arrives at one end of this link is through it, or None where there is no room to wait."""
        if self.rate is None:
            return arrival
        begin = max(arrival, self.free_at[way])
        if (begin - arrival) * self.rate / 8 + len(frame) > LONGEST_QUEUE_BYTES:
            return None
        self.free_at[way] = begin + 8 * len(frame) / self.rate
        return self.free_at[way]


class Switch:

    def __init__(self, hosts, device, seed):
        self.ports = {name: Port(name, open_tap(pid, device)) for name, pid in hosts.items()}
        self.by_tap = {port.tap: port for port in self.ports.values()}
        self.homes = {}  # of addresses, learned from what a host sends
        self.delay = self.jitter = self.loss = 0.0
        self.parted = set()
        self.random = random.Random(seed)
        self.in_flight, self.number = [], 0
        self.last_arrival = {}
        self.counts = {"carried": 0, "lost": 0, "cut": 0, "full": 0}

    def obey(self, order):
        for key in ("delay", "jitter", "loss"):
            if key in order:
                setattr(self, key, order[key])
        if "host" in order:
            for key in {"rate", "sends", "receives"} & set(order):
                setattr(self.ports[order["host"]], key, order[key])
        if "pair" in order:
            pair = frozenset(order["pair"])
            self.parted.discard(pair) if order["joined"] else self.parted.add(pair)
        return self.counts

    def take(self, source):
        """All frames that a host has sent."""
        while True:
            try:
                frame = os.read(source.tap, LONGEST_FRAME)
            except BlockingIOError:
                return
            self.homes[frame[6:12]] = source
            home = self.homes.get(frame[:6])
            for target in [home] if home else self.ports.values():
                if target is not source:
                    self.send(source, target, frame)

    def send(self, source, target, frame):
        if not source.sends or not target.receives or frozenset((source.name, target.name)) in self.parted:
            self.counts["cut"] += 1
            return
        if self.random.random() < self.loss:
            self.counts["lost"] += 1
            return
        self.arrive(source, target, frame, self.reach_target, source.passed("up", frame, time.monotonic()),
                    self.delay + self.jitter * self.random.random())

    def reach_target(self, source, target, frame, at):
        self.arrive(source, target, frame, self.deliver, target.passed("down", frame, at))

    def deliver(self, source, target, frame, _):
        try:
            os.write(target.tap, frame)
            self.counts["carried"] += 1
        except OSError:  # a device that is not up yet
            self.counts["cut"] += 1

    def arrive(self, source, target, frame, step, at, later=0.0):
        """Has `step` done when a frame has come there."""
        if at is None:
            self.counts["full"] += 1
            return
        way = source.name, target.name, step.__name__
        at = self.last_arrival[way] = max(at + later, self.last_arrival.get(way, 0.0))
        self.number += 1
        heapq.heappush(self.in_flight, (at, self.number, step, source, target, frame))

    def go_on(self):
        """All steps that are due; returns the seconds until more are."""
        while self.in_flight:
            wait = self.in_flight[0][0] - time.monotonic()
            if wait > 0:
                return wait
            at, _, step, source, target, frame = heapq.heappop(self.in_flight)
            step(source, target, frame, at)
        return None

    def run(self):
        orders = b""
        while True:
            ready, _, _ = select.select([0, *self.by_tap], [], [], self.go_on())
            for tap in ready:
                if tap != 0:
                    self.take(self.by_tap[tap])
            if 0 in ready:
                more = os.read(0, 65536)
                if not more:
                    return
                *lines, orders = (orders + more).split(b"\n")
                for line in lines:
                    os.write(1, json.dumps(self.obey(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    Switch(**json.loads(sys.argv[1])).run()
