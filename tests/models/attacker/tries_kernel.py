"""Attempts with system calls by their numbers, as code with its own instructions would make them."""

import ctypes
import mmap
import os
import platform

LIBC = ctypes.CDLL(None, use_errno=True)
ON_ARM = platform.machine() == "aarch64"
# The numbers are those on x86_64 and on aarch64.
NUMBERS = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "capget": (125, 90),
    "chroot": (161, 51),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "epoll_create1": (291, 20),
    "eventfd2": (290, 19),
    "execve": (59, 221),
    "execveat": (322, 281),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "get_robust_list": (274, 100),
    "getpid": (39, 172),
    "init_module": (175, 105),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioprio_get": (252, 31),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "landlock_create_ruleset": (444, 444),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "sched_getattr": (315, 275),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_rr_get_interval": (148, 127),
    "sched_setattr": (314, 274),
    "seccomp": (317, 277),
    "semget": (64, 190),
    "sendmsg": (46, 211),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "setresuid": (117, 147),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "signalfd4": (289, 74),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "timer_create": (222, 107),
    "timerfd_create": (283, 85),
    "timer_delete": (226, 111),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
X32 = 0x40000000


def system_call(number, *arguments):
    ctypes.set_errno(0)
    values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = LIBC.syscall(ctypes.c_long(number), *values)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def call(name, *arguments):
    return system_call(NUMBERS[name][ON_ARM], *arguments)


def make(name, arguments=()):
    return call(name, *arguments)


def with_null(name):
    """Make a system call with zeros as arguments. If it is allowed, the kernel rejects the arguments."""
    return call(name, 0, 0, 0, 0, 0, 0)


def with_bad(name):
    """Make a system call with arguments that are wrong if it is allowed."""
    return call(name, -1, -1, -1, -1, -1, -1)


def as_x32(name="getpid"):
    """Make a system call by its number in the x32 ABI, which a list of x86_64's numbers does not contain."""
    return system_call(X32 | NUMBERS[name][0])


def as_i386():
    """Make a system call through the gate of 32-bit programs, where numbers have other meanings: 20 is getpid."""
    code = bytes.fromhex("53b814000000cd805bc3")  # push rbx; mov eax, 20; int 0x80; pop rbx; ret
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_int)(at)()


def prctl(option, *arguments):
    padded = (*arguments, 0, 0, 0, 0)[:4]
    return call("prctl", option, *padded)


def forget_the_parent():
    """Try PR_SET_PDEATHSIG, to outlive the runtime."""
    return prctl(1, 0)


def become_dumpable():
    return prctl(4, 1)


def drop_no_new_privs():
    return prctl(38, 0)


def allow_tracers():
    """Try PR_SET_PTRACER_ANY."""
    return prctl(0x59616D61, -1)


def move_its_memory():
    """Try PR_SET_MM, which falsifies addresses in /proc."""
    return prctl(35, 1, 0)
