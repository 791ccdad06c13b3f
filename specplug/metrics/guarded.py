"""The process that guard.py starts: takes limits upon itself, then runs program.py of the folder it stands in.

Imports nothing of this project; its result goes back through a pipe, behind the word that it was given.
"""

import os
import resource
import sys
from typing import Any

NEW_USER, NEW_NET = 0x10000000, 0x40000000  # of unshare(2)
REFUSED = (  # audit events, by how they begin
    *("socket.", "ctypes.", "subprocess.", "resource.", "pty.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn"),
    *("os.system", "os.kill", "signal.pthread_kill", "os.startfile"),
)
PATHS = (  # refused for paths outside of the folder
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink"),
    *("os.truncate", "os.utime", "os.setxattr", "os.removexattr", "shutil."),
)


def take_limits(seconds: float, memory: int, file_size: int) -> None:
    unshare_network()
    whole = int(seconds) + 1
    for name, value in (
        ("RLIMIT_CPU", whole),
        ("RLIMIT_AS", memory),
        ("RLIMIT_FSIZE", file_size),
        ("RLIMIT_NPROC", 0),  # does nothing to root, whose forks are refused below
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_CORE", 0),
    ):
        kind = getattr(resource, name, None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (lower, lower))


def unshare_network() -> None:
    """Into a name space without a network, where the kernel permits it; sockets are refused anyhow."""
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEW_NET) != 0:
            libc.unshare(NEW_USER | NEW_NET)
    except (ImportError, OSError, AttributeError):
        pass


def guard(folder: str) -> None:
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    realpath, fsdecode, inside = os.path.realpath, os.fsdecode, folder.rstrip("/") + "/"

    def outside(path: Any) -> bool:
        return not isinstance(path, int) and path is not None and not realpath(fsdecode(path)).startswith(inside)

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            refused = bool(isinstance(flags, int) and flags & writing) and outside(path)
        elif event.startswith(PATHS):
            refused = any(outside(each) for each in arguments if isinstance(each, (str, bytes, os.PathLike)))
        else:
            refused = event.startswith(REFUSED)
        if refused:
            raise PermissionError(f"{event} is not allowed here")

    sys.addaudithook(look)


def main() -> None:
    word = sys.stdin.buffer.read()
    result = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    seconds, memory, file_size = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with open("program.py", encoding="utf-8") as file:
        source = file.read()
    sys.argv = ["program.py"]
    take_limits(seconds, memory, file_size)
    module = sys.modules["__main__"] = type(sys)("__main__")  # where dataclasses, pickle and others look for its names
    guard(os.getcwd())
    try:
        exec(compile(source, "program.py", "exec"), vars(module))
        said = "passed"
    except SystemExit:
        said = "ended itself before its tests did"
    except BaseException as error:  # whatever the program raises is its result
        said = f"{type(error).__name__}: {error}"[:200]
    os.write(result, word + said.encode(errors="replace"))
    os._exit(0)


if __name__ == "__main__":
    main()
