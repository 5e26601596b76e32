"""Messages from a model to its runtime that its stub would not send."""

import array
import ctypes
import fcntl
import gc
import mmap
import os
import socket
import stat
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

# The request that executes now.
REQUEST = []
MAX_PACKET_BYTES = 32 * 1024
# Kinds of messages, and a datatype.
ANSWER, GROW, RELEASE, RETIRE, LOG, FP32 = 6, 17, 19, 20, 21, 11
# Set while a thread runs on after the attempt.
RUNNING = threading.Event()


def peer():
    """Find the stub's own object for its runtime: nothing in a process is hidden from its code."""
    (found,) = [
        each
        for each in gc.get_objects()
        if type(each).__module__ == "moonpool.stub.peers.peer" and type(each).__name__ == "Peer"
    ]
    return found


def packed(*fields):
    from moonpool.ipc.codec import encode

    return encode(*fields)


def work():
    return socket.socket(fileno=os.dup(peer().conversation.channel.fileno()))


def control():
    return socket.socket(fileno=os.dup(peer().control._channel.fileno()))


def batch():
    return peer().executing[0]


def say(packet):
    channel = peer().conversation.channel
    if hasattr(channel, "look_ns"):
        forge(packet)
    else:
        with work() as end:
            end.send(packet)
    # The stub's own answer would follow.
    threading.Event().wait()


def forge(packet):
    """Write a packet into the memory of the work channel, of any size, and ring all bells."""
    with open("/proc/self/maps") as maps:
        (line,) = [each for each in maps if "moonpool-slot" in each and " rw-s " in each]
    base = int(line.split("-")[0], 16)
    ctypes.memmove(base + 4096, packet, min(len(packet), MAX_PACKET_BYTES))
    ctypes.c_uint32.from_address(base + 256).value = len(packet)
    ctypes.c_uint64.from_address(base).value += 1
    for fd in range(3, 256):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, b"x")
        except OSError:
            continue


def tell_denials(rows, times=1):
    """Send denials that the model made up."""
    with control() as end:
        for _ in range(times):
            end.send(packed(49, rows))


def say_garbage():
    say(b"\xc1\xff garbage")


def say_pickle():
    """Send a pickle that would run a program in a process that unpickles it."""
    import pickle

    class Program:
        def __reduce__(self):
            return os.system, ("touch /tmp/moonpool-was-unpickled",)

    say(pickle.dumps(Program()))


def say_extension():
    """Send an extension type of msgpack, of which some decoders make objects."""
    import msgpack

    say(msgpack.packb([ANSWER, msgpack.ExtType(0, b"x" * 16)]))


def say_too_much():
    say(bytes(MAX_PACKET_BYTES + 1))


def say_nested():
    say(b"\x91" * (MAX_PACKET_BYTES - 1) + b"\xc0")


def say_bomb():
    """Send an array of four thousand million items, in nine bytes."""
    say(b"\xdd\xff\xff\xff\xff\x01\x01\x01\x01")


def answer_lie(number=None, region=None, at=0, size=16, shape=(4,), datatype=FP32, offset=0, index=0):
    """Send an answer with one output in the response region, with these changes."""
    regions = peer().regions
    own = regions.arena.regions()[0].id
    block = [own if region is None else region, at, size]
    row = [index, datatype, list(shape), 0, offset, size]
    fields = [batch() if number is None else number, 0, [], [], [block]]
    say(packed(ANSWER, *fields, packed([row]), [[None, None]], None))


def answer_not_a_number():
    answer_lie(at=float("nan"))


def flood_answers():
    """Send one answer again and again, as long as the runtime reads."""
    packet = packed(ANSWER, batch(), 0, [], [], [], packed([]), None, None)
    send = peer().conversation.channel.send_waiting
    while True:
        send(packet)


def flood_releases():
    with control() as end:
        while True:
            end.send(packed(RELEASE, [[1, 64]] * 1024))


def flood_growth():
    with control() as end:
        while True:
            end.send(packed(GROW, 1, -1))


def send_descriptors(count):
    """Send descriptors with lines for the log; the runtime would hold them if it took them."""
    fds = array.array("i", [0, 1, 2] * 3)
    with control() as end:
        for _ in range(count):
            line = packed(LOG, 0, "with descriptors", "", 0)
            end.sendmsg([line], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    return count


def change_flags():
    """Make all descriptors blocking, then not, then blocking, in the hope that the runtime shares the flag."""
    changed = 0
    for fd in range(256):
        for flags in (0, os.O_NONBLOCK, 0):
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, flags)
                changed += 1
            except OSError:
                continue
    return changed


# This holds the descriptor of a response region, which the stub was kept from closing.
KEPT_REGION = []


def with_kept_region(function, size=1 << 24):
    from moonpool.ipc import region

    original = region.SharedRegion.forget_fd

    def keep(self):
        if self.fd >= 0:
            KEPT_REGION.append(os.dup(self.fd))
        original(self)

    if not KEPT_REGION:
        region.SharedRegion.forget_fd = keep
        try:
            KEPT.append(pb_utils.empty((size,), np.uint8))
        finally:
            region.SharedRegion.forget_fd = original
    return function(KEPT_REGION[0])


def keep_and_retire(rounds, size):
    """Grow, keep the descriptor, give the region back, and repeat; returns the memory of these regions in the end."""
    from moonpool.ipc import region

    original = region.SharedRegion.forget_fd
    sizes = {}
    refused = 0

    def keep(self):
        if self.fd >= 0:
            fd = os.dup(self.fd)
            KEPT_REGION.append(fd)
        original(self)

    regions = peer().regions
    region.SharedRegion.forget_fd = keep
    try:
        for number in range(rounds):
            try:
                # Each region is a little larger than all before it.
                made = regions._grow(size + number * mmap.PAGESIZE)
            except Exception as error:
                refused += 1
                if "MOONPOOL_REGION_LIMIT_BYTES" not in str(error):
                    raise
                continue
            number_of = made.id
            made.close()
            regions._send_control(RETIRE, number_of)
    finally:
        region.SharedRegion.forget_fd = original
    for fd in KEPT_REGION:
        status = os.fstat(fd)
        # Write again to regions that were given back; the kept descriptor is enough for that.
        for at in range(0, status.st_size, mmap.PAGESIZE):
            os.pwrite(fd, b"x", at)
        sizes[status.st_ino] = os.fstat(fd).st_blocks * 512
    for fd in KEPT_REGION:
        os.close(fd)
    KEPT_REGION.clear()
    return {"held": sum(sizes.values()), "refused": refused}


def truncate_region():
    return with_kept_region(lambda fd: os.ftruncate(fd, 0))


def grow_region():
    return with_kept_region(lambda fd: os.ftruncate(fd, 1 << 40))


def seal_region():
    """Try F_ADD_SEALS with F_SEAL_WRITE."""
    return with_kept_region(lambda fd: fcntl.fcntl(fd, 1033, 8))


def map_beyond_region():
    """Read the bytes behind the end of a region."""

    def read(fd):
        with mmap.mmap(fd, 1 << 25) as pages:
            return pages[(1 << 25) - 1]

    return with_kept_region(read)


def flip_answers(seconds):
    """Change the lengths inside of the answer all the time, from now on and for so long."""
    regions = peer().regions.arena.regions()
    views = [np.frombuffer(region.memory(), np.uint32) for region in regions]
    deadline = threading.Timer(seconds, RUNNING.clear)
    RUNNING.set()

    def flip():
        while RUNNING.is_set():
            for view in views:
                # Blocks begin at multiples of 64 bytes, and a string with its length.
                view[:4096:16] = 0xFFFFFFFF
                view[:4096:16] = 3

    threading.Thread(target=flip, daemon=True).start()
    deadline.daemon = True
    deadline.start()


def search(backwards):
    """Count a text in the memory that this process shares; this request must not contain it."""
    wanted = backwards[::-1].encode()
    count = 0
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[:2] for line in maps if "memfd:" in line]
    for place, mode in ranges:
        if mode.startswith("r"):
            first, last = (int(each, 16) for each in place.split("-"))
            count += ctypes.string_at(first, last - first).count(wanted)
    return count


def ask(model, count):
    """Call another model with so many bytes, so that memory may be lent in both directions."""
    tensor = pb_utils.Tensor("X", np.zeros(count // 4, np.float32))
    request = pb_utils.InferenceRequest(model_name=model, requested_output_names=["OUT_X"], inputs=[tensor])
    response = request.exec()
    if response.has_error():
        raise ValueError(response.error().message())
    KEPT.append(response)
    return response.output_tensors()[0].as_numpy().nbytes


KEPT = []


def load_model(name, config, file):
    """Load its own code in a process with its own configuration."""
    files = {"file:1/model.py": file.encode()}
    pb_utils.load_model(model_name=name, files=files, config=config)


def unload_model(name):
    pb_utils.unload_model(name)


def make_metrics(count):
    """Make metrics with endless names and labels."""
    made = 0
    for number in range(count):
        family = pb_utils.MetricFamily(name=f"hostile_{number}", description="x", kind=pb_utils.MetricFamily.COUNTER)
        family.Metric(labels={f"label_{number}": "x"})
        KEPT.append(family)
        made += 1
    return made


def make_metric(name, labels):
    family = pb_utils.MetricFamily(name=name, description="x", kind=pb_utils.MetricFamily.COUNTER)
    family.Metric(labels=labels).increment(1)
    KEPT.append(family)


def log(count, text):
    for _ in range(count):
        pb_utils.Logger.log_info(text)
    return count


def write_output(count, line):
    for _ in range(count):
        os.write(1, line.encode("latin-1"))
    return count


def log_from(file, text):
    """Send a line of the log as the stub does, with a false place."""
    with control() as end:
        end.send(packed(LOG, 1, text, file, 1))
