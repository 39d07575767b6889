"""Downloads of weights beside curl: over slow connections, over a fast one with the hash, and killed again and again.

Hubs give each connection so much, so several are as fast as curl with as many ranges. Where the server is fast, the
file is hashed while it comes, and curl's is hashed afterwards. Medians of three rounds, in which both take turns.
KILLS=5 kills less often.
"""

import contextlib
import hashlib
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.clients.weights_fetch import FetchCost
from benchmarks.report import Figure, print_figures

ROUNDS: Final = 3
KILLS: Final = int(os.environ.get("KILLS", "50"))
CONNECTIONS: Final = 8
MIB: Final = 1 << 20
LARGE_BYTES: Final = 2_000_000_000
MIDDLE_BYTES: Final = 227_000_000
SLOW_BYTES_PER_SECOND: Final = 10_000_000
KILLED_BYTES_PER_SECOND: Final = 20_000_000
MOST_BEFORE_KILL_BYTES: Final = 60 * MIB
POLL_SECONDS: Final = 0.01
CURL: Final = shutil.which("curl") or ""
SHA256SUM: Final = shutil.which("sha256sum") or ""


def write_file(path: Path, size_bytes: int) -> str:
    """Write bytes that do not repeat soon, and return their SHA-256."""
    block = random.Random(size_bytes).randbytes(61 * MIB)  # noqa: S311 - weights, not a secret
    left = size_bytes
    with path.open("wb") as file:
        while left:
            left -= file.write(block[:left])
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def serve(folder: Path, bytes_per_second: int = 0) -> Iterator[str]:
    """Run the server in a process of its own, and yield its URL."""
    command = [sys.executable, "-m", "benchmarks.servers.weights_server", str(folder)]
    options = ["--connection-bytes-per-second", str(bytes_per_second)]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().strip() if server.stdout else ""
        finally:
            server.kill()


def fetch(url: str, sha256: str, folder: Path) -> FetchCost:
    """Fetch a file in a process of its own, as an agent does."""
    command = [sys.executable, "-m", "benchmarks.clients.weights_fetch", url, str(folder)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    cost = msgspec.json.decode(output, type=FetchCost)
    if cost.sha256 != sha256:
        sys.exit(f"{url} was damaged on the way")
    return cost


def curl_ranges(url: str, folder: Path) -> None:
    """Fetch the middle file with curl, as many ranges at once as we have connections."""
    ends = [MIDDLE_BYTES * number // CONNECTIONS for number in range(CONNECTIONS + 1)]
    curls = [
        subprocess.Popen([CURL, "-s", "-r", f"{first}-{end - 1}", "-o", str(folder / f"part{first}"), url])
        for first, end in itertools.pairwise(ends)
    ]
    if any(curl.wait() for curl in curls):
        sys.exit("curl failed")


def curl_and_hash(url: str, folder: Path) -> None:
    """Fetch a file with curl, and then hash it."""
    subprocess.run([CURL, "-s", "-o", str(folder / "whole"), url], check=True)
    subprocess.run([SHA256SUM, str(folder / "whole")], check=True, stdout=subprocess.DEVNULL)


def take_turns(
    url: str, sha256: str, folder: Path, other: Callable[[str, Path], None]
) -> tuple[list[FetchCost], list[float]]:
    """Fetch a file with both, some rounds; return our costs, and the seconds of the other."""
    ours, others = list[FetchCost](), list[float]()
    for number in range(ROUNDS):
        for is_ours in (number % 2 == 0, number % 2 != 0):
            folder.mkdir()
            os.sync()  # what was written before must not slow down what is measured
            began = time.monotonic()
            if is_ours:
                ours.append(fetch(url, sha256, folder))
            else:
                other(url, folder)
                others.append(time.monotonic() - began)
            shutil.rmtree(folder)
    return ours, others


class DownloadState(msgspec.Struct, rename="camel"):
    """The ranges that a partial download lacks, as its state file has them."""

    size_bytes: int
    missing: list[tuple[int, int]]


def read_present_bytes(folder: Path) -> int:
    """Return how many bytes a download that was killed keeps."""
    with contextlib.suppress(FileNotFoundError):
        state = msgspec.json.decode((folder / "large.gguf.part.json").read_bytes(), type=DownloadState)
        return state.size_bytes - sum(end - first for first, end in state.missing)
    return 0


def count_sent(url: str) -> int:
    """Return how many bytes of the large file the server has sent."""
    with urllib.request.urlopen(f"{url}/sent/large.gguf") as response:  # noqa: S310 - our own server on loopback
        return int(response.read())


def kill_often(url: str, sha256: str, folder: Path) -> float:
    """Kill a download again and again; return the most bytes of a connection that one kill made us fetch twice."""
    rng = random.Random(0)  # noqa: S311 - no secret
    most, wasted_before = 0, 0
    for number in range(KILLS):
        until = count_sent(url) + rng.randrange(MOST_BEFORE_KILL_BYTES)
        command = [sys.executable, "-m", "benchmarks.clients.weights_fetch", f"{url}/large.gguf", str(folder)]
        with subprocess.Popen(command) as process:
            while count_sent(url) < until:
                time.sleep(POLL_SECONDS)
            if process.poll() is not None:
                sys.exit(f"the download ended before kill {number}")
            process.kill()
        wasted = count_sent(url) - read_present_bytes(folder)
        most, wasted_before = max(most, wasted - wasted_before), wasted
    fetch(f"{url}/large.gguf", sha256, folder)
    shutil.rmtree(folder)
    return most / CONNECTIONS


def measure(folder: Path) -> list[Figure]:
    """Measure all figures with files in `folder`."""
    served, to = folder / "served", folder / "to"
    served.mkdir()
    middle = write_file(served / "middle.gguf", MIDDLE_BYTES)
    large = write_file(served / "large.gguf", LARGE_BYTES)

    with serve(served, SLOW_BYTES_PER_SECOND) as url:
        slow, ranges = take_turns(f"{url}/middle.gguf", middle, to, curl_ranges)
    with serve(served) as url:
        fast, hashed = take_turns(f"{url}/large.gguf", large, to, curl_and_hash)
    with serve(served, KILLED_BYTES_PER_SECOND) as url:
        twice = kill_often(url, large, to)

    slow_seconds, fast_seconds = (statistics.median(cost.seconds for cost in costs) for costs in (slow, fast))
    ranges_seconds, hashed_seconds = statistics.median(ranges), statistics.median(hashed)
    peak = max(cost.peak_bytes for cost in [*slow, *fast])
    pause = max(cost.longest_pause_seconds for cost in [*slow, *fast])
    curl, both = ranges_seconds / slow_seconds, hashed_seconds / fast_seconds
    return [
        Figure("227 MB, 10 MB/s a connection", slow_seconds, ranges_seconds, None, "s"),
        Figure("  speed, beside 8 ranges by curl", curl, None, 0.9, "times", at_least=True),
        Figure("2 GB, unthrottled, with the hash", fast_seconds, hashed_seconds, None, "s"),
        Figure("  speed, beside curl and sha256sum", both, None, 0.8, "times", at_least=True),
        Figure(f"fetched twice by a connection, most of {KILLS} kills", twice / MIB, None, 16, "MiB"),
        Figure("memory above idle, peak", peak / MIB, None, 64, "MiB"),
        Figure("longest pause of the event loop", pause * 1000, None, None, "ms"),
    ]


def main() -> None:
    """Print the figures; the floor of a time is that of the other."""
    if not CURL or not SHA256SUM:
        sys.exit("weights_download needs curl and sha256sum")
    with tempfile.TemporaryDirectory(prefix="pomona-benchmark-") as folder:
        print_figures("downloads of weights", measure(Path(folder)))


if __name__ == "__main__":
    main()
