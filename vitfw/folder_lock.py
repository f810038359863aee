"""One start at a time in a run folder: two would write into each other's checkpoints and records."""

import fcntl
import os
import platform
import time
from pathlib import Path
from typing import IO

from vitfw.run import LOCK, RunError, left_by_a_start

LOCK_SECONDS = 120  # a file server may take that long to notice that the machine which held the lock is gone


class FolderLock:
    """Held by rank 0 while it trains. A lock of the process: it ends with it, and loader workers do not inherit it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[str] | None = None

    def acquire(self, seconds: float = LOCK_SECONDS) -> None:
        """Raises RunError where another process still holds it after `seconds`. A folder that is no run's is left alone, and
        so is a file system without locks."""
        if self.folder.exists() and not (self.folder / "config.yaml").exists() and not left_by_a_start(self.folder):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file, end = (self.folder / LOCK).open("a+", encoding="utf-8"), time.monotonic() + seconds
        told = False
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                file.seek(0)
                who = f"out={self.folder}: another start of this run is at work ({file.read().strip() or 'unknown'})"
                if time.monotonic() >= end:
                    file.close()
                    raise RunError(f"{who}; wait for it, stop it, or choose another out=") from error
                if not told:
                    print(f"{who}; waiting up to {seconds:.0f} s for its end", flush=True)
                told = True
                time.sleep(min(1.0, seconds / 4))
            except OSError:
                break  # no locks here
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
