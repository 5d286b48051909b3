"""What stands between a sandboxed program and the rest of the machine besides its own promises: namespaces.

The doors that a program closes behind itself (Landlock, the list of system calls, no capabilities) hold without any of
this. Namespaces are a second wall where the machine has them: no other process, no segment of shared memory, no network
device and no mount of the machine is there to be reached. Bubblewrap is taken where it is installed and works; else the
program's own process makes them; else there are none.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_USER, _MOUNTS, _PROCESSES, _NETWORK = 0x10000000, 0x00020000, 0x20000000, 0x40000000
_MESSAGES, _HOST_NAME, _CONTROL_GROUPS = 0x08000000, 0x04000000, 0x02000000
_EVERY = _USER | _MOUNTS | _PROCESSES | _NETWORK | _MESSAGES | _HOST_NAME | _CONTROL_GROUPS
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
TEMPORARY_BYTES = 16 << 20


@dataclass(frozen=True)
class Paths:
    """What a program sees of the file system.

    ``work`` is its working folder and ``temporary`` its place for temporary files (a file system of its own, of
    ``TEMPORARY_BYTES``, where there are walls); ``readable`` are files and folders, ``work`` among them. ``search`` are
    the folders in which its ``packages`` are, of which only these are readable.
    """

    work: Path
    temporary: Path
    readable: tuple[str, ...]
    search: tuple[str, ...]


def make_paths(folder: Path, files: Sequence[str], packages: Sequence[str]) -> Paths:
    """Return the paths of a program, its own two made in ``folder``: Python's library, the system's, files and
    packages.
    """
    work, temporary = folder / "work", folder / "temporary"
    work.mkdir()
    temporary.mkdir()
    own = {
        os.path.dirname(os.__file__),
        *(os.path.join(base, "lib") for base in (sys.base_prefix, sys.base_exec_prefix)),
    }
    installed = [path for name in packages for path in find_package(name)]
    readable = (*sorted(own), *_LIBRARIES, *_DEVICES, *files, *installed, str(work))
    return Paths(work, temporary, readable, tuple(sorted({os.path.dirname(path) for path in installed})))


def find_package(name: str) -> list[str]:
    """Return the files and folders of the installed package ``name``, and of the libraries that came with it; none if
    it isn't installed.
    """
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        return [str(spec.origin)]
    folders = [str(folder) for folder in spec.submodule_search_locations]
    return [path for folder in folders for path in (folder, f"{folder}.libs") if os.path.isdir(path)]


@dataclass(frozen=True)
class Walls:
    """``bubblewrap`` is the path of ``bwrap``; ``namespaces`` the kinds that the process makes itself (clone flags)."""

    bubblewrap: str | None = None
    namespaces: int = 0

    @property
    def stand(self) -> bool:
        """Whether there is any wall at all."""
        return self.bubblewrap is not None or self.namespaces != 0

    def command(self, inner: list[str], paths: Paths, *, files: bool) -> list[str]:
        """Return ``inner`` within these walls; ``files``: of the file system only ``paths`` are there."""
        if self.bubblewrap is None:
            return inner
        options = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--chdir", str(paths.work)]
        if files:
            for path in filter(os.path.exists, paths.readable):
                options += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
            options += ["--size", str(TEMPORARY_BYTES), "--tmpfs", str(paths.temporary)]
        else:
            options += ["--dev-bind", "/", "/"]
        return [self.bubblewrap, *options, "--", *inner]


NO_WALLS = Walls()


def candidates() -> Iterator[Walls]:
    """Yield the walls that a machine may have, the best first and none at all last. Whether they stand, only a try
    tells.
    """
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is not None:
        yield Walls(bubblewrap=bubblewrap)
    yield Walls(namespaces=_EVERY)
    yield Walls(namespaces=_EVERY & ~_USER)  # of root, where users have no namespaces
    yield NO_WALLS
