"""The kernel that executes a phase's cells: this interpreter, a clean environment, stops that are passed on.

Papermill's own status fields say `completed` for cells that never ran when a kernel is killed; nothing here reads them.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NotebookExecutionManager

from d2lib.errors import Refused
from d2lib.evidence import notebook
from d2lib.evidence.ledger import locked

_SCRATCH, _OWNER = "d2-kernel-", "owner"
STOP_GRACE = 1800.0
"""Seconds that a phase has to reach a boundary after the first request to stop; then its kernel is killed."""
REPLY_GRACE = 5.0
"""Seconds between a kernel's `idle` and its reply. An interrupt that meets ipykernel's own code, just before a cell's,
ends the request without any reply: the kernel is idle, and the client would wait for ever."""


@dataclass
class Progress:
    """What happened to the cells, from the kernel's own messages and nothing else."""

    completed: int = 0
    """Code cells that ran to their end without an error."""
    stopped_before: int | None = None
    """Number of the code cell that was not started because of a request to stop."""
    died_in: int | None = None
    error_in: int | None = None
    error: tuple[str, str] | None = None
    """(class, message) of a cell's exception, from the kernel's reply."""
    trouble: str | None = None
    """What kept the kernel from starting, or the notebook from being saved."""


@dataclass
class Stop:
    """SIGINT, SIGTERM and SIGHUP while a phase runs: remembered, and handed to the kernel as SIGINT."""

    requested: bool = False
    at: float = 0.0
    pid: int | None = None
    """The kernel, while it executes a cell."""
    undelivered: bool = False
    _previous: dict[int, Any] = field(default_factory=dict)

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Take over the signals; puts the earlier handlers back. Off the main thread it does nothing."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup stays in force
                    self._previous[number] = signal.signal(number, self._handle)
        try:
            yield self
        finally:
            for taken, handler in self._previous.items():
                signal.signal(taken, handler)
            self._previous.clear()

    def _handle(self, number: int, frame: object) -> None:
        if not self.requested:
            self.requested, self.at = True, time.monotonic()
            name = signal.Signals(number).name
            print(f"\nd2: {name}: stopping at the next boundary", file=sys.stderr, flush=True)
        self.undelivered = True
        self.deliver()

    def deliver(self) -> None:
        """Interrupt the kernel if it executes a cell now; an idle kernel would ignore it."""
        if self.undelivered and self.pid is not None:
            self.undelivered = False
            with suppress(ProcessLookupError):  # the kernel died; the client notices
                os.kill(self.pid, signal.SIGINT)


@contextmanager
def scratch_folder() -> Iterator[str]:
    """A kernel's own temporary folder, removed in the end; those of this user whose engine was killed go first.

    Its engine holds the lock on the file `owner` in it, so that a living one's is told from a dead one's.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with suppress(OSError, Refused):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink() and (folder / _OWNER).is_file():
                with locked(folder / _OWNER, wait=False):
                    shutil.rmtree(folder)
    with ExitStack() as stack:
        while True:
            scratch = tempfile.mkdtemp(prefix=_SCRATCH)
            with suppress(Refused):  # removed by another engine before it was locked
                stack.enter_context(locked(Path(scratch, _OWNER), wait=True))
                break
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        yield scratch


class ThisInterpreter(KernelSpecManager):
    """Kernels run this very Python, not whichever one a user's kernelspec names."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """The one kernel there is."""
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="Python 3 (ipykernel)",
            language="python",
        )


class WorkingNotebook(NotebookExecutionManager):  # type: ignore[misc]
    """Papermill's execution state, saved to the attempt's working file in one step each time."""

    def save(self, **kwargs: Any) -> None:
        """Write the notebook as it stands; a reader never sees half of it."""
        self.nb: Any = kwargs.get("nb") or self.nb
        notebook.save(Path(self.output_path), notebook.to_text(self.nb))
        self.last_save_time = self.now()

    def finish(self) -> None:
        """Close the bar and note the time; cells that never ran stay as they are, unlike papermill's own."""
        self.cleanup_pbar()
        self.end_time = self.now()
        self.nb.metadata.papermill["end_time"] = self.end_time.isoformat()
        self.nb.metadata.papermill["duration"] = (self.end_time - self.start_time).total_seconds()
        self.save()


class Client(PapermillNotebookClient):  # type: ignore[misc]
    """Executes the cells in order until one fails, the kernel dies, or a stop was asked for."""

    def __init__(self, manager: NotebookExecutionManager, stop: Stop, forward: bool, **options: Any) -> None:
        super().__init__(manager, force_raise_errors=True, iopub_timeout=120, **options)
        self._stop, self._forward = stop, forward
        self._idle: float | None = None
        """When the kernel said that it was through with the cell."""
        self._unanswered = False

    def run(self, environment: Mapping[str, str]) -> Progress:
        """Start a kernel in this environment and execute the cells."""
        self.reset_execution_trackers()
        progress = Progress()
        with scratch_folder() as scratch:
            # a scratch profile: no start-up files, extensions or history of the user's
            own = {"IPYTHONDIR": scratch, "JUPYTER_RUNTIME_DIR": scratch}
            self.km = AsyncKernelManager(
                kernel_name="python3",
                kernel_spec_manager=ThisInterpreter(),
                connection_file=os.path.join(scratch, "kernel.json"),
                transport="ipc" if len(scratch) < 80 else "tcp",  # a Unix socket's path has at most 107 bytes
                ip=os.path.join(scratch, "s") if len(scratch) < 80 else "127.0.0.1",
            )
            with self.setup_kernel(env={**environment, **own}):
                information = self.wait_for_reply(self.kc.kernel_info())
                self.nb.metadata["language_info"] = information["content"]["language_info"]
                self._cells(progress)
        return progress

    def _cells(self, progress: Progress) -> None:
        total, number = sum(notebook.is_code(cell) for cell in self.nb.cells), 0
        for index, cell in enumerate(self.nb.cells):
            if not notebook.is_code(cell):
                self._heading(cell, number, total)
                if self.nb_man.pbar:
                    self.nb_man.pbar.update(1)
                continue
            number += 1
            if self._stop.requested:
                progress.stopped_before = number
                return
            self.nb_man.cell_start(cell, index)
            self._idle = None
            try:
                self.execute_cell(cell, index)
                progress.completed += 1
            except CellExecutionError as error:
                self.nb_man.cell_exception(cell, cell_index=index, exception=error)
                progress.error_in, progress.error = number, (error.ename, error.evalue)
                return
            except DeadKernelError:
                if self._unanswered:
                    progress.stopped_before = number
                else:
                    progress.died_in = number
                return
            except CellTimeoutError as error:
                progress.error_in, progress.error = number, ("CellTimeoutError", str(error).splitlines()[0])
                return
            finally:
                self._stop.pid = None
                self.nb_man.cell_complete(cell, cell_index=index)

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        """Take a message from the kernel; once it executes the cell, a waiting stop is handed on."""
        if msg["msg_type"] == "execute_input":
            self._stop.pid = getattr(self.km.provisioner, "pid", None)
        elif msg["msg_type"] == "status" and msg["content"]["execution_state"] == "idle":
            self._idle = time.monotonic()
        self._stop.deliver()
        return super().process_message(msg, cell, cell_index)

    def output(self, outs: list[Any], msg: Any, display_id: str | None, cell_index: int) -> Any:
        """Keep an output; a stream goes on in the stream before it, with what a carriage return overwrites dropped."""
        out = super().output(outs, msg, display_id, cell_index)
        if out is not None and out.output_type == "stream":
            fresh = out.text
            if len(outs) > 1 and outs[-2].output_type == "stream" and outs[-2].name == out.name:
                outs.pop()
                outs[-1].text = append_stream(outs[-1].text, fresh)
            else:
                out.text = append_stream("", fresh)
            if self._forward:
                sys.stderr.write(fresh)
                sys.stderr.flush()
        return out

    def log_output_message(self, output: Any) -> None:
        """Streams go to papermill's files when it was given some; the terminal has them already."""
        if output.output_type == "stream":
            target = self.stdout_file if output.name == "stdout" else self.stderr_file
            if target is not None:
                target.write(output.text)
                target.flush()

    async def _async_check_alive(self) -> None:
        await super()._async_check_alive()
        if self._stop.requested and self._idle is not None and time.monotonic() - self._idle > REPLY_GRACE:
            self._unanswered = True
            raise DeadKernelError("the interrupt left the request without a reply")
        if self._stop.requested and time.monotonic() - self._stop.at > STOP_GRACE and self.km is not None:
            print(f"d2: no boundary within {STOP_GRACE:.0f} s; killing the kernel", file=sys.stderr)
            await self.km.shutdown_kernel(now=True)

    def _heading(self, cell: Any, number: int, total: int) -> None:
        first = cell.source.lstrip().split("\n", 1)[0]
        if self._forward and first.startswith("#"):
            print(f"[{number}/{total}] {first.lstrip('# ')}", file=sys.stderr, flush=True)


def append_stream(text: str, fresh: str) -> str:
    """A terminal stream's text after more of it: a carriage return overwrites what its line held."""
    if "\r" not in fresh and not text.endswith("\r"):
        return text + fresh
    start = text.rfind("\n") + 1
    *lines, last = (text[start:] + fresh).split("\n")
    kept = [_shown(line) for line in lines]
    kept.append(_shown(last) + ("\r" if last.endswith("\r") else ""))
    return text[:start] + "\n".join(kept)


def _shown(line: str) -> str:
    line = line.rstrip("\r")
    return line[line.rfind("\r") + 1 :]
