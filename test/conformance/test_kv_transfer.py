"""One suite for all connectors: what a receiver and a sender promise, with the other side a real process where it dies."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from vla_cloud.kv_transfer.connector import (
    Arrived,
    Broken,
    Cause,
    Failed,
    PeerRefused,
    PeerUnreachable,
    Pushed,
    Reservation,
    Verify,
    WriterGone,
)
from vla_cloud.kv_transfer.digest import pool_digest
from vla_cloud.kv_transfer.factory import make_receiver, make_sender
from vla_cloud.kv_transfer.frames import HEADER, Kind, encode
from vla_cloud.kv_transfer.handshake import Address, Deadline, greet, read_frame
from vla_cloud.kv_transfer.layout import KvLayout, LayoutMismatch
from vla_cloud.kv_transfer.memory import KvMemory
from vla_cloud.kv_transfer.peer import Peer
from vla_cloud.kv_transfer.receiver import ReceiverOptions
from vla_cloud.kv_transfer.sender import SenderOptions
from vla_common.clock import SystemClock

ROOT = Path(__file__).parents[2]
CLOCK = SystemClock()
LAYOUT = KvLayout("toy", "c0ffee", layers=6, kv_heads=2, head_dim=64)  # pieces of 16 KiB
BLOCKS = 64
BIG = KvLayout("toy", "c0ffee", layers=8, kv_heads=8, head_dim=64)  # pieces of 64 KiB, a pool of 128 MiB
BIG_BLOCKS = 256
SENTINEL = 0xA5
os.environ.setdefault("UCX_TLS", "tcp,cma,self")
no_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None,
                             reason="NIXL is not installed: pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1")
KINDS = ["shm", "tcp", pytest.param("nixl", marks=no_nixl)]
LIVE_S = 20.0  # only a hang lasts that long


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def closing():
    """Ends are closed after the test, and nothing of theirs stays."""
    threads = threading.active_count()
    ends = []

    def keep(end):
        ends.append(end)
        return end

    yield keep
    for end in reversed(ends):
        end.close()
    assert threading.active_count() <= threads, [thread.name for thread in threading.enumerate()]


def pool(layout=LAYOUT, blocks=BLOCKS, seed=None) -> KvMemory:
    memory = KvMemory(layout, blocks)
    memory.array[:] = SENTINEL if seed is None else filled(layout, blocks, seed)
    return memory


def filled(layout, blocks, seed):
    return np.random.default_rng(seed).integers(0, 256, (layout.layers, blocks, layout.piece_bytes), np.uint8)


def soon(ns=int(LIVE_S * 1e9)):
    return CLOCK.monotonic_ns() + ns


def wait(poll, until=lambda events: bool(events), limit_s=LIVE_S):
    """Events so far, when the condition holds; fails if it never does."""
    events, end = [], time.monotonic() + limit_s
    while not until(events):
        assert time.monotonic() < end, events
        events += poll()
        time.sleep(0.0005)
    return events


def tasks(pid):
    return Path(f"/proc/{pid}/task").iterdir()


def state(task):
    return task.joinpath("stat").read_text().rpartition(")")[2].split()[0]


class Process:
    """kv_process.py."""

    def __init__(self, role, kind, layout=LAYOUT, blocks=BLOCKS, seed=1):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("kv_process.py")),
             json.dumps([role, kind, layout.to_json(), blocks, seed])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        while not (line := self.process.stdout.readline()).startswith("{"):
            assert line, "the process ended at its start"
        self.address = json.loads(line)["ready"]

    def tell(self, *command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self):
        return json.loads(self.process.stdout.readline())

    def ask(self, *command):
        self.tell(*command)
        return self.hear()

    def signal(self, number):
        """After SIGSTOP no thread of it runs any more: one that was running goes on for a moment otherwise."""
        self.process.send_signal(number)
        end = time.monotonic() + LIVE_S
        while number == signal.SIGSTOP and not all(state(task) == "T" for task in tasks(self.process.pid)):
            assert time.monotonic() < end
            time.sleep(0.001)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def ends(kind, closing, verify=Verify.FULL, seed=1, layout=LAYOUT, blocks=BLOCKS):
    target, source = pool(layout, blocks), pool(layout, blocks, seed)
    receiver = closing(make_receiver(kind, target, CLOCK, ReceiverOptions(verify=verify)))
    sender = closing(make_sender(kind, source, CLOCK, SenderOptions(connect_s=LIVE_S)))
    return target, source, receiver, sender


def pushed(sender, token, limit_s=LIVE_S):
    """Until every push so far is written: the sender has no call for it, so the number of bytes tells."""
    transfer = sender._owners[token]._transfers[token]
    end = time.monotonic() + limit_s
    while transfer.peek() is not None or not transfer.granted:
        assert time.monotonic() < end
        time.sleep(0.001)


# -- what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", list(Verify))
def test_the_bytes_arrive_in_the_reserved_blocks_and_nowhere_else(kind, closing, verify):
    target, source, receiver, sender = ends(kind, closing, verify)
    rng = np.random.default_rng(3)
    remote, local = rng.permutation(BLOCKS)[:20].tolist(), rng.permutation(BLOCKS)[:20].tolist()
    receiver.expect(Reservation("t", tuple(remote), 7))
    sender.open("t", receiver.address, soon())
    sender.push("t", range(0, 6), local[:5], remote[:5])  # a first chunk, all layers
    for layer in range(6):  # the rest by layer
        sender.push("t", range(layer, layer + 1), local[5:], remote[5:])
    sender.finish("t", b"first token 42")
    (arrived,) = wait(receiver.poll)
    assert isinstance(arrived, Arrived) and (arrived.token, arrived.epoch, arrived.payload) == ("t", 7, b"first token 42")
    assert arrived.num_bytes == 20 * LAYOUT.block_bytes
    expected = np.full_like(target.array, SENTINEL)
    expected[:, remote] = source.array[:, local]
    assert np.array_equal(target.array, expected)
    (done,) = wait(sender.poll)
    assert isinstance(done, Pushed) and done.num_bytes == arrived.num_bytes
    assert receiver.writer_gone("t") and receiver.poll() == [] and receiver.counters.arrived == 1


def test_transfers_of_several_senders_interleave(kind, closing):
    target, source, receiver, sender = ends(kind, closing)
    second = closing(make_sender(kind, pool(seed=2), CLOCK))
    for number in range(12):
        receiver.expect(Reservation(f"t{number}", tuple(range(number * 5, number * 5 + 5)), number))
        (sender, second)[number % 2].open(f"t{number}", receiver.address, soon())
    for layer in range(6):
        for number in range(12):
            blocks = list(range(number * 5, number * 5 + 5))
            (sender, second)[number % 2].push(f"t{number}", range(layer, layer + 1), blocks, blocks)
    for number in range(12):
        (sender, second)[number % 2].finish(f"t{number}", str(number).encode())
    events = wait(receiver.poll, lambda seen: len(seen) == 12)
    assert all(isinstance(item, Arrived) for item in events), events
    for number in range(12):
        want = (source.array if number % 2 == 0 else filled(LAYOUT, BLOCKS, 2))[:, number * 5:number * 5 + 5]
        assert np.array_equal(target.array[:, number * 5:number * 5 + 5], want)


def test_the_descriptors_are_readable_when_there_is_something_to_poll(kind, closing):
    import select
    _, _, receiver, sender = ends(kind, closing)
    poller = select.poll()
    poller.register(receiver.fileno(), select.POLLIN)
    poller.register(sender.fileno(), select.POLLIN)
    assert poller.poll(0) == []
    receiver.expect(Reservation("t", (1,), 1))
    sender.open("t", receiver.address, soon())
    sender.push("t", range(6), [1], [1])
    sender.finish("t", b"")
    assert poller.poll(LIVE_S * 1e3)
    wait(receiver.poll)
    wait(sender.poll)
    assert poller.poll(0) == []


# -- no token from KV that was not verified -----------------------------------------------------------------------------


def test_a_changed_byte_is_found_by_full_verification(kind, closing):
    target, _, receiver, sender = ends(kind, closing)
    receiver.expect(Reservation("t", (3, 9), 1))
    sender.open("t", receiver.address, soon())
    sender.push("t", range(6), [0, 1], [3, 9])
    pushed(sender, "t")
    wait(lambda: [1] if np.array_equal(target.array[5, 9], filled(LAYOUT, BLOCKS, 1)[5, 1]) else [])
    target.array[4, 9, 777] ^= 1
    sender.finish("t", b"token")
    (broken,) = wait(receiver.poll)
    assert isinstance(broken, Broken) and broken.cause is Cause.CHECKSUM and broken.writer_gone
    assert receiver.counters.arrived == 0


@pytest.mark.parametrize("verify", list(Verify))
def test_missing_pieces_are_found_by_every_verification(kind, closing, verify):
    _, _, receiver, sender = ends(kind, closing, verify)
    receiver.expect(Reservation("t", (3, 9), 1))
    sender.open("t", receiver.address, soon())
    sender.push("t", range(5), [0, 1], [3, 9])
    sender.finish("t", b"token")
    (broken,) = wait(receiver.poll)
    assert isinstance(broken, Broken) and broken.cause is Cause.INCOMPLETE and broken.writer_gone


def test_swapped_blocks_or_layers_change_the_checksum():
    array = filled(LAYOUT, BLOCKS, 5)
    whole = pool_digest(array, [1, 2, 3])
    assert pool_digest(array, [1, 3, 2]) != whole
    other = array.copy()
    other[[0, 1]] = array[[1, 0]]
    assert pool_digest(other, [1, 2, 3]) != whole
    assert pool_digest(array.copy(), [1, 2, 3]) == whole


def test_what_is_verified_by_default(kind, closing):
    """Sockets carry bytes a long way: all are read back. Copies and RDMA: the notice counts."""
    target, _, receiver, sender = ends(kind, closing, verify=None)
    receiver.expect(Reservation("t", (3,), 1))
    sender.open("t", receiver.address, soon())
    sender.push("t", range(6), [0], [3])
    pushed(sender, "t")
    wait(lambda: [1] if np.array_equal(target.array[5, 3], filled(LAYOUT, BLOCKS, 1)[5, 0]) else [])
    target.array[0, 3, 0] ^= 1
    sender.finish("t", b"")
    (event,) = wait(receiver.poll)
    assert isinstance(event, Broken if kind == "tcp" else Arrived)


@pytest.mark.parametrize("blocks, layers", [([4], range(6)), ([3], range(6))], ids=["not granted", "twice"])
def test_a_sender_does_not_write_what_it_was_not_granted(kind, closing, blocks, layers):
    target, _, receiver, sender = ends(kind, closing)
    receiver.expect(Reservation("t", (3,), 1))
    sender.open("t", receiver.address, soon())
    sender.push("t", range(6), [0], [3])
    sender.push("t", layers, [0], blocks)
    (failed,) = wait(sender.poll)
    assert isinstance(failed, Failed) and failed.cause is Cause.REFUSED
    (broken,) = wait(receiver.poll)
    assert isinstance(broken, Broken) and broken.cause is Cause.ABORTED and broken.writer_gone
    assert (target.array[:, 4] == SENTINEL).all()


# -- who may come in -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field, value", [("model_hash", "bad"), ("layers", 7), ("kv_heads", 3), ("head_dim", 32),
                                          ("block_size", 32), ("dtype", "float16"), ("version", 2)])
def test_another_layout_is_refused_by_the_name_of_the_field_and_within_the_deadline(kind, closing, field, value):
    receiver = closing(make_receiver(kind, pool(), CLOCK))
    layout = KvLayout(**(LAYOUT.to_json() | {field: value}))
    sender = closing(make_sender(kind, KvMemory(layout, 4), CLOCK, SenderOptions(connect_s=LIVE_S)))
    with pytest.raises(LayoutMismatch) as caught:
        sender.connect(receiver.address)
    assert caught.value.field == field
    receiver.expect(Reservation("t", (1,), 1))
    sender.open("t", receiver.address, soon())
    (failed,) = wait(sender.poll)
    assert isinstance(failed, Failed) and failed.cause is Cause.LAYOUT and field in failed.detail
    assert receiver.cancel("t")


def test_close_waits_for_a_connection_that_is_just_ending(kind, closing, monkeypatch):
    leave = Peer._leave

    def slowly(self, cause, detail):
        leave(self, cause, detail)
        time.sleep(0.1)

    monkeypatch.setattr(Peer, "_leave", slowly)
    receiver = closing(make_receiver(kind, pool(), CLOCK))
    sender = closing(make_sender(kind, KvMemory(KvLayout(**(LAYOUT.to_json() | {"kv_heads": 3})), 4), CLOCK))
    with pytest.raises(LayoutMismatch):
        sender.connect(receiver.address)  # the fixture finds a thread that is left


class SlowLock:
    """A lock after which the threads of links are slow."""

    def __init__(self):
        self._lock = threading.Lock()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.1)


def test_close_waits_for_a_link_that_is_just_ending(kind, closing):
    receiver = closing(make_receiver(kind, pool(), CLOCK))
    receiver._lock = SlowLock()
    sender = closing(make_sender(kind, pool(), CLOCK))
    sender.connect(receiver.address)
    sender.close()
    wait(lambda: [1] if not receiver._threads else [])
    receiver.close()
    assert not [thread for thread in threading.enumerate() if thread.name == f"kv-{receiver.kind}-0"]


def _listener(kind):
    if kind == "shm":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0vla-test-{os.getpid()}-{time.monotonic_ns()}")
        return listener, f"vla-kv+shm://{listener.getsockname()[1:].decode()}#0"
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"vla-kv+{kind}://127.0.0.1:{listener.getsockname()[1]}#0"


@pytest.mark.parametrize("greeting", [None, b"x" * 16, HEADER.pack(b"VLKV", 9, 1, 0, 2, 0) + b"{}"],
                         ids=["silent", "garbage", "other version"])
def test_a_receiver_that_never_answers_is_an_error_in_time(kind, closing, greeting):
    listener, address = _listener(kind)
    listener.listen(4)
    accepted = []

    def serve():
        accepted.append(listener.accept()[0])
        if greeting:
            accepted[0].sendall(greeting)

    thread = threading.Thread(target=serve)
    thread.start()
    # What it waits for is the end of this time only if nothing comes.
    sender = closing(make_sender(kind, pool(), CLOCK, SenderOptions(connect_s=LIVE_S if greeting else 0.3)))
    began = time.monotonic()
    with pytest.raises(LayoutMismatch if greeting and greeting[4] == 9 else PeerUnreachable):
        sender.connect(address)
    assert time.monotonic() - began < LIVE_S / 2
    thread.join()
    accepted[0].close()
    listener.close()
    with pytest.raises(PeerUnreachable):  # and nobody there at all
        sender.connect(address)


def test_a_wrong_secret_is_refused(kind, closing):
    target, _, receiver, sender = ends(kind, closing)
    receiver.expect(Reservation("t", (1,), 1))
    wrong = receiver.address.split("#")[0] + "#" + "0" * 64
    with pytest.raises(PeerRefused, match="secret"):
        sender.connect(wrong)
    sender.open("t", wrong, soon())
    (failed,) = wait(sender.poll)
    assert failed.cause is Cause.REFUSED
    assert receiver.counters.refused_links >= 1 and (target.array == SENTINEL).all()
    assert receiver.address.split("#")[1] not in repr(Address.parse(receiver.address, kind))


def test_a_wrong_token_is_refused_and_counted(kind, closing):
    target, _, receiver, sender = ends(kind, closing)
    receiver.expect(Reservation("right", (1,), 1))
    sender.open("wrong", receiver.address, soon())
    with contextlib.suppress(ValueError):  # it may be refused before
        sender.push("wrong", range(6), [0], [1])
        sender.finish("wrong", b"")
    (failed,) = wait(sender.poll)
    assert isinstance(failed, Failed) and failed.cause is Cause.REFUSED
    assert receiver.counters.late == 1 and (target.array == SENTINEL).all() and receiver.poll() == []


def test_a_token_has_one_writer(kind, closing):
    _, _, receiver, sender = ends(kind, closing)
    second = closing(make_sender(kind, pool(seed=2), CLOCK))
    receiver.expect(Reservation("t", (1,), 1))
    sender.open("t", receiver.address, soon())
    pushed(sender, "t")
    second.open("t", receiver.address, soon())
    (failed,) = wait(second.poll)
    assert failed.cause is Cause.REFUSED
    sender.push("t", range(6), [0], [1])
    sender.finish("t", b"")
    assert isinstance(wait(receiver.poll)[0], Arrived)


def test_a_peer_that_says_nothing_loses_its_place(kind, closing):
    receiver = closing(make_receiver(kind, pool(), CLOCK, ReceiverOptions(handshake_s=0.2, max_links=1)))
    where = Address.parse(receiver.address, kind)
    mute = socket.socket(socket.AF_UNIX) if kind == "shm" else socket.socket()
    mute.connect(f"\0{where.place}" if kind == "shm" else where.host_port)
    mute.settimeout(LIVE_S)
    while mute.recv(4096):
        pass
    mute.close()
    sender = closing(make_sender(kind, pool(), CLOCK))
    end = time.monotonic() + LIVE_S
    while True:
        try:
            sender.connect(receiver.address)
            break
        except PeerUnreachable:
            assert time.monotonic() < end


# -- cancel and abort --------------------------------------------------------------------------------------------------


def test_cancelled_before_a_writer_came_is_free_at_once_and_late_signals_are_ignored(kind, closing):
    target, _, receiver, sender = ends(kind, closing)
    receiver.expect(Reservation("t", (1, 2), 1))
    assert receiver.cancel("t") and receiver.writer_gone("t")
    receiver.expect(Reservation("next", (1, 2), 2))  # the same blocks
    sender.open("t", receiver.address, soon())
    with contextlib.suppress(ValueError):  # it may be refused before
        sender.push("t", range(6), [0, 1], [1, 2])
        sender.finish("t", b"late")
    (failed,) = wait(sender.poll)
    assert failed.cause is Cause.REFUSED and receiver.counters.late == 1
    assert (target.array == SENTINEL).all() and receiver.poll() == []
    assert receiver.cancel("never made")


def test_cancel_reaches_the_sender_which_lets_go_at_once(kind, closing):
    """D refuses or gives up: P's blocks are free without any timeout."""
    _, _, receiver, sender = ends(kind, closing)
    receiver.expect(Reservation("t", (1, 2), 1))
    sender.open("t", receiver.address, soon(10**12))
    sender.push("t", range(3), [0, 1], [1, 2])
    pushed(sender, "t")
    gone = receiver.cancel("t")
    assert gone == (kind == "tcp")
    (failed,) = wait(sender.poll)
    assert isinstance(failed, Failed) and failed.cause is Cause.REVOKED
    if not gone:
        assert wait(receiver.poll) == [WriterGone("t")]
    assert receiver.writer_gone("t") and receiver.poll() == []
    receiver.expect(Reservation("next", (1, 2), 2))


def test_cancel_after_arrival_takes_the_event_back(kind, closing):
    _, _, receiver, sender = ends(kind, closing)
    receiver.expect(Reservation("t", (1,), 1))
    sender.open("t", receiver.address, soon())
    sender.push("t", range(6), [0], [1])
    sender.finish("t", b"")
    wait(sender.poll)
    wait(lambda: [1] if receiver.counters.arrived else [])
    assert receiver.cancel("t") and receiver.poll() == []


def test_after_abort_nothing_more_is_written(kind, closing):
    target, _, receiver, sender = ends(kind, closing, layout=BIG, blocks=BIG_BLOCKS)
    rng = np.random.default_rng(0)
    for attempt in range(6):
        token = f"t{attempt}"
        everything = tuple(range(BIG_BLOCKS))
        receiver.expect(Reservation(token, everything, attempt))
        sender.open(token, receiver.address, soon())
        sender.push(token, range(8), everything, everything)
        transfer = sender._owners[token]._transfers[token]
        pushed_some = rng.uniform(0, 0.02)
        time.sleep(pushed_some)
        sender.abort(token)
        if kind == "tcp" and transfer.opened:  # what was on its way may land while the reservation stands
            (broken,) = wait(receiver.poll)
        elif kind == "tcp":  # on a busy machine it was aborted before the receiver heard of it
            assert receiver.cancel(token)
            broken = None
        before = pool_digest(target.array, everything)
        time.sleep(0.02)
        assert pool_digest(target.array, everything) == before
        if kind != "tcp":
            (broken,) = wait(receiver.poll) if not receiver.cancel(token) else [None]
            assert broken in (None, WriterGone(token)) or broken.cause is Cause.ABORTED
        target.array[:] = SENTINEL
    assert sender.poll() == [] and not sender._owners


def test_a_sender_that_aborts_tells_the_receiver(kind, closing):
    _, _, receiver, sender = ends(kind, closing)
    receiver.expect(Reservation("t", (1,), 1))
    sender.open("t", receiver.address, soon())
    pushed(sender, "t")
    sender.abort("t")
    (broken,) = wait(receiver.poll)
    assert isinstance(broken, Broken) and broken.cause is Cause.ABORTED and broken.writer_gone
    with pytest.raises(ValueError, match="not open"):
        sender.push("t", range(6), [0], [1])
    sender.abort("t")
    assert sender.poll() == []


def test_blocks_of_a_transfer_cannot_be_reserved_again(kind, closing):
    receiver = closing(make_receiver(kind, pool(), CLOCK))
    receiver.expect(Reservation("t", (1, 2), 1))
    for bad in (Reservation("u", (2, 3), 2), Reservation("t", (5,), 2), Reservation("u", (5, 5), 2),
                Reservation("u", (BLOCKS,), 2), Reservation("u", (), 2), Reservation("u" * 200, (5,), 2)):
        with pytest.raises(ValueError):
            receiver.expect(bad)
    assert receiver.cancel("t")
    receiver.expect(Reservation("u", (2, 3), 2))


def test_impossible_calls_of_a_sender_are_refused(kind, closing):
    _, _, receiver, sender = ends(kind, closing)
    receiver.expect(Reservation("t", (1,), 1))
    sender.open("t", receiver.address, soon())
    for layers, local, remote in ((range(7), [0], [1]), (range(6), [BLOCKS], [1]), (range(6), [0, 1], [1]),
                                  (range(-1, 2), [0], [1])):
        with pytest.raises(ValueError):
            sender.push("t", layers, local, remote)
    with pytest.raises(ValueError, match="open already"):
        sender.open("t", receiver.address, soon())
    with pytest.raises(ValueError, match="payload"):
        sender.finish("t", bytes(1 << 17))
    sender.finish("t", b"")
    with pytest.raises(ValueError):
        sender.push("t", range(6), [0], [1])


# -- death and standstill, with real processes -------------------------------------------------------------------------


def half_done(kind, closing, layout=LAYOUT, blocks=BLOCKS):
    """A sender process that has written half the layers of blocks 0..9 for token "t"."""
    target = pool(layout, blocks)
    receiver = closing(make_receiver(kind, target, CLOCK))
    process = closing(Process("sender", kind, layout, blocks))
    receiver.expect(Reservation("t", tuple(range(10)), 1))
    assert process.ask("open", "t", receiver.address, 30) is None
    assert process.ask("push", "t", [0, layout.layers // 2], list(range(10)), list(range(10))) is None
    last = filled(layout, blocks, 1)[layout.layers // 2 - 1, 9]
    wait(lambda: [1] if np.array_equal(target.array[layout.layers // 2 - 1, 9], last) else [])
    return target, receiver, process


def test_a_writer_killed_in_the_middle_breaks_the_transfer_and_frees_its_blocks(kind, closing):
    _, receiver, process = half_done(kind, closing)
    process.signal(signal.SIGKILL)
    (broken,) = wait(receiver.poll)
    assert isinstance(broken, Broken) and broken.cause is Cause.PEER_DEAD and broken.writer_gone
    assert receiver.writer_gone("t")
    receiver.expect(Reservation("next", tuple(range(10)), 2))
    healthy = closing(make_sender(kind, pool(seed=4), CLOCK))
    healthy.open("next", receiver.address, soon())
    healthy.push("next", range(6), range(10), range(10))
    healthy.finish("next", b"")
    assert isinstance(wait(receiver.poll)[0], Arrived)


def test_a_stopped_writer_keeps_its_blocks_in_quarantine_until_it_is_dead(kind, closing):
    target, receiver, process = half_done(kind, closing)
    process.signal(signal.SIGSTOP)
    gone = receiver.cancel("t")
    if kind == "tcp":  # the receiver does the writing
        assert gone
        receiver.expect(Reservation("next", tuple(range(10)), 2))
        return
    assert not gone and not receiver.writer_gone("t") and not receiver.cancel("t")
    time.sleep(0.3)
    assert receiver.poll() == []
    with pytest.raises(ValueError, match="may still touch"):
        receiver.expect(Reservation("next", (9,), 2))
    process.signal(signal.SIGKILL)
    assert wait(receiver.poll) == [WriterGone("t")]
    assert receiver.writer_gone("t")
    receiver.expect(Reservation("next", tuple(range(10)), 2))


def test_a_link_that_the_receiver_gives_up_does_not_prove_its_writer_dead(kind, closing):
    """Garbage from a writer that may still be at it: only where the receiver writes itself are the blocks free."""
    target, source, receiver, sender = ends(kind, closing)
    receiver.expect(Reservation("t", (1, 2), 1))
    sender.open("t", receiver.address, soon())
    sender.push("t", range(1), [0], [1])
    wait(lambda: [1] if np.array_equal(target.array[0, 1], source.array[0, 0]) else [])
    (peer,) = sender._peers.values()
    peer.link.socket.send(b"x" * 64)
    (broken,) = wait(receiver.poll)
    assert isinstance(broken, Broken) and broken.cause is Cause.PEER_DEAD
    assert broken.writer_gone == (kind == "tcp") and receiver.writer_gone("t") == (kind == "tcp")


def test_a_late_writer_cannot_touch_blocks_of_the_next_request(kind, closing):
    target, receiver, process = half_done(kind, closing)
    process.signal(signal.SIGSTOP)
    process.tell("push", "t", [LAYOUT.layers // 2, LAYOUT.layers], list(range(10)), list(range(10)))
    process.tell("finish", "t", "late")
    gone = receiver.cancel("t")
    if not gone:
        process.signal(signal.SIGCONT)
        assert wait(receiver.poll) == [WriterGone("t")]
    receiver.expect(Reservation("next", tuple(range(10)), 2))
    target.array[:, :10] = 0x11  # the next request's
    process.signal(signal.SIGCONT)
    process.hear()
    process.hear()
    assert process.ask("wait", "t", LIVE_S)["what"] in ("Failed", "Pushed")
    process.ask("wait", "none", 0.1)
    assert (target.array[:, :10] == 0x11).all()
    assert receiver.poll() == [] and receiver.counters.arrived == 0


@pytest.mark.parametrize("stop", [False, True], ids=["killed", "stopped, cancelled, continued"])
def test_a_writer_hit_at_any_moment_leaves_whole_kv_or_none(kind, closing, stop):
    """The writer's process is hit while it copies 128 MiB; what arrives is whole, and the rest is reused unharmed."""
    target = pool(BIG, BIG_BLOCKS)
    receiver = closing(make_receiver(kind, target, CLOCK))
    rng = np.random.default_rng(11)
    everything = list(range(BIG_BLOCKS))
    process = None
    for attempt in range(4):
        process = process or closing(Process("sender", kind, BIG, BIG_BLOCKS))
        token = f"t{attempt}"
        receiver.expect(Reservation(token, tuple(everything), attempt))
        assert process.ask("connect", receiver.address) is None
        for command in (("open", token, receiver.address, 30), ("push", token, [0, 8], everything, everything),
                        ("finish", token, "x")):
            assert process.ask(*command) is None
        time.sleep(rng.uniform(0, 0.08))
        if stop:
            process.signal(signal.SIGSTOP)
            if not receiver.cancel(token):
                process.signal(signal.SIGCONT)
                assert wait(receiver.poll) == [WriterGone(token)]
            target.array[:] = SENTINEL
            process.signal(signal.SIGCONT)
            process.ask("wait", token, LIVE_S)
            assert receiver.poll() == []
            assert (target.array == SENTINEL).all()
        else:
            process.signal(signal.SIGKILL)
            wait(lambda: [1] if not receiver._threads else [])
            (event,) = receiver.poll() or [None]
            if event is None:  # on a busy machine it was hit before it was granted anything: there is no writer
                assert receiver.cancel(token)
            elif isinstance(event, Arrived):
                assert np.array_equal(target.array, filled(BIG, BIG_BLOCKS, 1))
            else:
                assert event.cause is Cause.PEER_DEAD and event.writer_gone
            process = None


def test_a_killed_receiver_fails_the_transfer_and_the_next_one_goes_elsewhere(kind, closing):
    first = closing(Process("receiver", kind))
    second = closing(make_receiver(kind, pool(), CLOCK))
    sender = closing(make_sender(kind, pool(seed=1), CLOCK, SenderOptions(connect_s=LIVE_S)))
    assert first.ask("expect", "t", [1, 2], 1) is None
    sender.open("t", first.address, soon())
    sender.push("t", range(2), [0, 1], [1, 2])
    pushed(sender, "t")
    first.signal(signal.SIGKILL)
    with contextlib.suppress(ValueError):  # it may have failed before
        sender.push("t", range(2, 6), [0, 1], [1, 2])
    (failed,) = wait(sender.poll)
    assert isinstance(failed, Failed) and failed.cause is Cause.UNREACHABLE
    first.process.wait()
    sender.open("again", first.address, soon())  # the dead one is not remembered as alive
    (failed,) = wait(sender.poll)
    assert failed.cause is Cause.UNREACHABLE
    second.expect(Reservation("u", (1,), 1))
    sender.open("u", second.address, soon())
    sender.push("u", range(6), [0], [1])
    sender.finish("u", b"")
    assert isinstance(wait(second.poll)[0], Arrived)
    assert not [name for name in os.listdir("/dev/shm") if "vla-kv" in name]


def test_a_receiver_that_stands_still_costs_no_more_than_the_deadline(kind, closing):
    receiver = closing(Process("receiver", kind, BIG, BIG_BLOCKS))
    sender = closing(make_sender(kind, pool(BIG, BIG_BLOCKS, 1), CLOCK))
    assert receiver.ask("expect", "t", list(range(BIG_BLOCKS)), 1) is None
    assert receiver.ask("expect", "u", [1], 1)["error"] == "ValueError"
    sender.connect(receiver.address)
    sender.open("t", receiver.address, soon(int(5.0e9)))
    receiver.signal(signal.SIGSTOP)
    sender.open("v", receiver.address, soon(int(0.3e9)))
    sender.push("t", range(8), range(BIG_BLOCKS), range(BIG_BLOCKS))
    events = wait(sender.poll, lambda seen: len(seen) == 2, limit_s=LIVE_S)
    assert {item.cause for item in events if isinstance(item, Failed)} <= {Cause.DEADLINE, Cause.UNREACHABLE}
    assert all(isinstance(item, Failed) for item in events)
    receiver.signal(signal.SIGKILL)


# -- TCP only ----------------------------------------------------------------------------------------------------------


class Proxy:
    """Passes bytes between a sender and a receiver until it is cut."""

    def __init__(self, address):
        where = Address.parse(address, "tcp")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = address.replace(where.place, f"127.0.0.1:{self.listener.getsockname()[1]}")
        self.target, self.sockets, self.passed = where.host_port, [], 0
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self):
        near, _ = self.listener.accept()
        far = socket.create_connection(self.target)
        self.sockets += [near, far]
        for a, b in ((near, far), (far, near)):
            self.threads.append(threading.Thread(target=self._pass, args=(a, b)))
            self.threads[-1].start()

    def _pass(self, a, b):
        try:
            while data := a.recv(1 << 16):
                b.sendall(data)
                self.passed += len(data)
        except OSError:
            pass

    def cut(self):
        for sock in self.sockets:
            sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        for thread in self.threads:
            thread.join()
        for sock in [*self.sockets, self.listener]:
            sock.close()


def test_a_cut_link_ends_the_transfer_on_both_sides(closing):
    target, source, receiver, sender = ends("tcp", closing, layout=BIG, blocks=BIG_BLOCKS)
    proxy = Proxy(receiver.address)
    everything = tuple(range(BIG_BLOCKS))
    receiver.expect(Reservation("t", everything, 1))
    sender.open("t", proxy.address, soon())
    sender.push("t", range(8), everything, everything)
    wait(lambda: [1] if proxy.passed > 8 << 20 else [])
    proxy.cut()
    (broken,), (failed,) = wait(receiver.poll), wait(sender.poll)
    assert broken.cause is Cause.PEER_DEAD and broken.writer_gone and failed.cause is Cause.UNREACHABLE
    proxy.close()
    receiver.expect(Reservation("u", everything, 2))
    sender.open("u", receiver.address, soon())
    sender.push("u", range(8), everything, everything)
    sender.finish("u", b"")
    assert isinstance(wait(receiver.poll)[0], Arrived) and np.array_equal(target.array, source.array)


class Raw:
    """A sender that says what it likes."""

    def __init__(self, receiver):
        where = Address.parse(receiver.address, "tcp")
        self.socket = socket.create_connection(where.host_port)
        greet(self.socket, where.secret, LAYOUT, Deadline(CLOCK, LIVE_S))

    def say(self, kind, head, tail=b""):
        self.socket.sendall(encode(kind, head, len(tail)) + tail)

    def hear(self):
        return read_frame(self.socket, Deadline(CLOCK, LIVE_S))

    def ended(self):
        self.socket.settimeout(LIVE_S)
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def close(self):
        self.socket.close()


@pytest.mark.parametrize("head, size", [
    ({"layers": [0, 1], "blocks": [5]}, 1), ({"layers": [6, 7], "blocks": [1]}, 1),
    ({"layers": [-1, 0], "blocks": [1]}, 1), ({"layers": [2, 2], "blocks": [1]}, 0), ({"layers": 0, "blocks": [1]}, 1),
    ({"layers": [5, 7], "blocks": [1]}, 2), ({"layers": [0, 1], "blocks": [1, 1]}, 2),
    ({"layers": [0, 1], "blocks": [1, 2]}, 1), ({"layers": [0, 1], "blocks": "1"}, 1),
    ({"layers": [0, 1], "blocks": [[1]]}, 1), ({"layers": [0, 1]}, 1), ({}, 1), ({"layers": ["0", 1], "blocks": [1]}, 1),
], ids=str)
def test_the_receiver_refuses_writes_outside_the_reservation(closing, head, size):
    target = pool()
    receiver = closing(make_receiver("tcp", target, CLOCK))
    raw = closing(Raw(receiver))
    receiver.expect(Reservation("t", (1, 2), 1))
    raw.say(Kind.OPEN, {"token": "t"})
    assert raw.hear().head == {"token": "t", "epoch": 1, "blocks": [1, 2]}
    raw.say(Kind.WRITE, {"token": "t"} | head, bytes(size * LAYOUT.piece_bytes))
    assert raw.ended()
    (broken,) = wait(receiver.poll)
    assert broken.cause is Cause.FORBIDDEN and broken.writer_gone and receiver.counters.forbidden == 1
    assert (target.array == SENTINEL).all()


def test_writes_for_another_link_s_token_go_nowhere(closing):
    target, _, receiver, sender = ends("tcp", closing)
    receiver.expect(Reservation("t", (1,), 1))
    sender.open("t", receiver.address, soon())
    pushed(sender, "t")
    raw = closing(Raw(receiver))
    for layer in range(6):
        raw.say(Kind.WRITE, {"token": "t", "layers": [layer, layer + 1], "blocks": [1]}, bytes(LAYOUT.piece_bytes))
    raw.say(Kind.FINISH, {"token": "t", "epoch": 1, "pieces": 6, "digest": "0"})
    raw.say(Kind.ENDED, {"token": "t"})
    raw.say(Kind.OPEN, {"token": "t"})
    assert raw.hear().kind is Kind.DENY
    assert (target.array == SENTINEL).all() and receiver.counters.late == 9
    sender.push("t", range(6), [0], [1])
    sender.finish("t", b"")
    assert isinstance(wait(receiver.poll)[0], Arrived)


@pytest.mark.parametrize("change", [{"epoch": 2}, {"pieces": 5}, {"digest": "1"}, {"digest": None}, {"epoch": "1"}],
                         ids=str)
def test_a_wrong_notice_is_no_arrival(closing, change):
    target = pool()
    receiver = closing(make_receiver("tcp", target, CLOCK))
    raw = closing(Raw(receiver))
    receiver.expect(Reservation("t", (1,), 1))
    raw.say(Kind.OPEN, {"token": "t"})
    raw.hear()
    for layer in range(6):
        raw.say(Kind.WRITE, {"token": "t", "layers": [layer, layer + 1], "blocks": [1]}, bytes(LAYOUT.piece_bytes))
    good = {"token": "t", "epoch": 1, "pieces": 6,
            "digest": f"{pool_digest(np.zeros_like(target.array), [1]):016x}"}
    raw.say(Kind.FINISH, good | change)
    (broken,) = wait(receiver.poll)
    assert isinstance(broken, Broken) and broken.writer_gone
    assert broken.cause in (Cause.REFUSED, Cause.INCOMPLETE, Cause.CHECKSUM)


@pytest.mark.parametrize("seed", range(8))
def test_garbage_on_a_link_harms_nobody(closing, seed):
    rng = np.random.default_rng(seed)
    target = pool()
    receiver = closing(make_receiver("tcp", target, CLOCK))
    receiver.expect(Reservation("t", (1,), 1))
    raw = closing(Raw(receiver))
    junk = rng.bytes(200)
    if seed % 2:
        junk = HEADER.pack(b"VLKV", 1, int(rng.integers(1, 15)), 0, int(rng.integers(0, 1 << 32)),
                           int(rng.integers(0, 1 << 32))) + junk
    try:
        raw.socket.sendall(junk)
        raw.socket.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the receiver was quicker to cut it
    assert raw.ended()
    assert (target.array == SENTINEL).all() and receiver.poll() == [] and receiver.cancel("t")


# -- leaks ---------------------------------------------------------------------------------------------------------------


def test_random_ends_leave_nothing_behind(kind, closing):
    """Finish, abort, cancel and both at random: every token ends, and tables, descriptors and threads are as before."""
    target, source, receiver, sender = ends(kind, closing)
    sender.connect(receiver.address)
    rng = np.random.default_rng(5)
    descriptors = set(os.listdir("/proc/self/fd"))
    quarantined, waiting, arrived = {}, {}, 0
    free = set(range(BLOCKS))

    def handle(events):
        nonlocal arrived
        for item in events:
            if isinstance(item, Arrived):
                blocks = waiting.pop(item.token)
                assert np.array_equal(target.array[:, blocks], source.array[:, blocks])
                arrived += 1
                free.update(blocks)
            elif isinstance(item, WriterGone):
                free.update(quarantined.pop(item.token))
            else:
                assert item.writer_gone and item.cause is Cause.ABORTED, item
                free.update(waiting.pop(item.token))

    for number in range(400):
        handle(wait(receiver.poll, lambda seen: len(free) + sum(
            len(quarantined.get(i.token) or waiting.get(i.token) or ()) for i in seen) >= 8))
        token = f"t{number}"
        blocks = [int(block) for block in rng.permutation(sorted(free))[:rng.integers(1, 8)]]
        free.difference_update(blocks)
        receiver.expect(Reservation(token, tuple(blocks), number))
        waiting[token] = blocks
        sender.open(token, receiver.address, soon())
        cut = int(rng.integers(0, 7))
        sender.push(token, range(cut), blocks, blocks)
        way = rng.integers(4)
        if way == 0:
            sender.push(token, range(cut, 6), blocks, blocks)
            sender.finish(token, b"")
        if way == 1:
            sender.abort(token)
        if way in (1, 2):  # an abort can come before the receiver heard of the token: cancel answers for both
            handle(receiver.poll())
            if token in waiting:
                blocks = waiting.pop(token)
                if receiver.cancel(token):
                    free.update(blocks)
                else:
                    quarantined[token] = blocks
        if way == 3:
            sender.push(token, range(cut, 6), blocks, blocks)
            sender.finish(token, b"")
        sender.poll()
    end = time.monotonic() + LIVE_S
    while len(free) < BLOCKS:
        assert time.monotonic() < end, (waiting, quarantined)
        handle(receiver.poll())
        time.sleep(0.001)
    assert not receiver._table.busy and arrived > 100
    wait(lambda: [1] if not sender._owners else [])
    sender.poll()
    assert set(os.listdir("/proc/self/fd")) <= descriptors  # what tests before left may be closed meanwhile
