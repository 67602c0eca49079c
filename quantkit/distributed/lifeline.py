"""That the processes of a job end together: what one of them says before it fails, and what its silence means."""

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any, TextIO

from quantkit.errors import ResourceError

RESUME = "give the same command again to go on, with any number of processes"
LAUNCHED = "QUANTKITLAUNCHED"
"""The number of the process that has started this one by `launch`: it says itself whom it has lost."""
START = timedelta(minutes=30)
"""In which all processes of a job must have come together: people and schedulers start them one after another."""

_STARTED = "TORCHELASTIC_RUN_ID"  # by torchrun, which ends its processes as long as it lives
_GLANCE = 0.5  # seconds between looks at who has started this process
_KNOCK = 30.0  # seconds in which who has connected must say who it is


class Lifeline:
    """A connection of each process with the first that breaks the moment one of them dies, whatever it was doing.

    Args:
        rank, world: of this process and of its job.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._peers: dict[int, socket.socket] = {}
        self._stderr = sys.stderr  # of now: later a library's own words may be kept away from it
        self._ending = threading.Lock()  # taken once, by who decides how this process ends
        self._hearing = threading.Lock()  # held while another one's failure is being told

    def watch_launcher(self) -> None:
        """End this process when what has started it, and would end it, is gone; also before there is a connection."""
        if _STARTED in os.environ:  # one that was started by hand may outlive who did
            launcher = int(os.environ.get(LAUNCHED, os.getppid()))
            threading.Thread(target=self._watch_launcher, args=(launcher,), daemon=True, name="launcher").start()

    def _watch_launcher(self, launcher: int) -> None:
        while os.getppid() == launcher:
            time.sleep(_GLANCE)
        if self.rank:
            time.sleep(6 * _GLANCE)  # in which the first process, if it has lost it too, says so and ends this one
        self._end(ResourceError.exit_code, f"the launcher of this job was killed; {RESUME}", speaks=self.rank == 0)

    def connect(self, store: Any) -> None:
        """To the first process, or as the first with all others.

        Args:
            store: torch's, that all of them have.
        """
        host = os.environ["MASTER_ADDR"]
        if self.rank == 0:
            with socket.create_server((host, 0), backlog=self.world) as server:
                deadline = time.monotonic() + START.total_seconds()
                secret = secrets.token_hex(16)
                store.set("lifeline", f"{server.getsockname()[1]} {secret}")
                while len(self._peers) < self.world - 1:
                    server.settimeout(max(1e-3, deadline - time.monotonic()))
                    self._admit(server.accept()[0], secret.encode())
        else:
            port, secret = store.get("lifeline").decode().split()
            self._peers[0] = socket.create_connection((host, int(port)))
            self._peers[0].sendall(f"{secret} {self.rank}\n".encode())
        for peer in self._peers.values():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is gone says no word
        threading.Thread(target=self._watch, daemon=True, name="lifeline").start()

    def _admit(self, peer: socket.socket, secret: bytes) -> None:
        """Keep who is of this job: any process of the machine may knock, say anything, or nothing."""
        with contextlib.suppress(OSError):
            peer.settimeout(_KNOCK)
            # Without a buffer, into which the next words could fall.
            given, _, number = peer.makefile("rb", buffering=0).readline(100).strip().partition(b" ")
            if secrets.compare_digest(given, secret):
                peer.settimeout(None)
                self._peers[int(number)] = peer

    def leave(self) -> None:
        """Say that what ends now ends well, unless another process has said that it does not."""
        with self._hearing:
            self._tell({})

    def fail(self, code: int, text: str) -> None:
        """Say how this process fails. In the first it returns, and the error is told there; others end in here."""
        if self.rank == 0 and not self._ending.acquire(blocking=False):
            time.sleep(60)  # already being ended
        self._tell({"code": code, "text": text})
        if self.rank:
            time.sleep(10)  # in which the first process, having said what has happened, ends this one

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in list(self._peers.values()):  # which may still be coming
            with contextlib.suppress(OSError):
                peer.sendall(json.dumps(message).encode() + b"\n")

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for number, peer in self._peers.items():
            selector.register(peer, selectors.EVENT_READ, (number, bytearray()))
        while selector.get_map():
            for key, _ in selector.select():
                number, received = key.data
                try:
                    part = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                except OSError:
                    part = b""
                received += part
                if not part or b"\n" in received:
                    selector.unregister(key.fileobj)
                    self._heard(number, bytes(received))

    def _heard(self, number: int, message: bytes) -> None:
        """The last that another process has said; nothing at all, if it was killed."""
        words = json.loads(message) if message.endswith(b"\n") else None
        if words == {}:
            return
        # Once and no more: by the first process, or where that is gone by the next.
        if words is None:
            speaks = self.rank <= 1 and LAUNCHED not in os.environ
            self._end(ResourceError.exit_code, f"{lost(number)}; {RESUME}", speaks=speaks)
        else:
            with self._hearing:
                if self.rank == 0:
                    time.sleep(2 * _GLANCE)  # in which this process, if it fails likewise, says so as one alone would
                self._end(words["code"], words["text"], f"rank {number}: ", speaks=self.rank == 0)

    def _end(self, code: int, text: str, whose: str = "", *, speaks: bool) -> None:
        """End this process, and from the first all others, unless that is being done."""
        if not self._ending.acquire(blocking=False):
            return
        if self.rank == 0:
            self._tell({"code": code, "text": text})
        if speaks:
            say(f"{whose}{text}", self._stderr)
        os._exit(code)


def lost(number: int) -> str:
    """What is said of a process that has ended without a word."""
    return f"rank {number} was lost: killed, or its machine is gone"


def say(text: str, stream: TextIO) -> None:
    """An error, in one line."""
    with contextlib.suppress(OSError):
        stream.write(f"error: {text}\n")
        stream.flush()
