"""Formats of ranks and amounts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from nbdist.utils.rank_ranges import ranks as ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbdist.records import Device, RecoveryRecord


def places(numbers: Iterable[int], host_of: Mapping[int, str]) -> str:
    """Format ranks as `[0-3@host]`. Without the host if they are on several."""
    chosen = sorted(numbers)
    hosts = {host_of[number] for number in chosen}
    return f"[{ranks(chosen)}@{hosts.pop()}]" if len(hosts) == 1 else f"[{ranks(chosen)}]"


def devices(driven: Iterable[Device]) -> str:
    """Format devices: `2 x gpu (NVIDIA H100), 1 x cpu`."""
    kinds = Counter((device.platform, device.kind) for device in driven)
    return ", ".join(
        f"{number} x {platform}" + ("" if kind == platform else f" ({kind})")
        for (platform, kind), number in kinds.items()
    )


def size(size_bytes: float) -> str:
    """Format bytes in powers of 1024: `12 B`, `3.4 KiB`, `79.1 GiB`."""
    return _scaled(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def rate(bytes_per_s: float) -> str:
    """Format bytes per second in decimal units, as networks are specified: `12.5 GB/s`."""
    return _scaled(bytes_per_s, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def _scaled(amount: float, base: int, units: Sequence[str]) -> str:
    for unit in units:
        if amount < base - 0.5 or unit == units[-1]:
            break
        amount /= base
    digits = 0 if unit == units[0] or amount >= 99.95 else 1
    return f"{amount:,.{digits}f} {unit}"


def count(number: int, noun: str) -> str:
    """Format a count: `1 rank`, `1,200 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def flops(rate: float) -> str:
    """Format operations per second: `312 TFLOP/s`, `38.4 GFLOP/s`."""
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def duration(seconds: float) -> str:
    """Format seconds: `85 µs`, `3.1 ms`, `16.6 s`, `3 min 05 s`, `2 h 07 min`.

    The front end has the same function in `labextension/src/run/words.ts`.
    """
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds >= 59.95:
        minutes, rest = divmod(int(seconds + 0.5), 60)
        short = minutes < 60
        return f"{minutes} min {rest:02} s" if short else f"{minutes // 60} h {minutes % 60:02} min"
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        if 0 < seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def share(part: float) -> str:
    """Format a share: `13%`, `1.4%`, `<0.1%`, `>99.9%`."""
    if 0 < part < 0.0005:
        return "<0.1%"
    if 0.9995 <= part < 1:
        return ">99.9%"
    return f"{part:.1%}" if 0 < part < 0.0995 or 0.9905 <= part < 1 else f"{part:.0%}"


def recovered(recovery: RecoveryRecord) -> str:
    """Format a recovery: `recovered: rank 2 died after step 7, resumed after step 5, 1 s lost`."""
    reason, _, _ = recovery.reason.partition("\n")
    onward = f"resumed after step {recovery.step:,}" if recovery.step else "restarted"
    onward += f" with {count(recovery.workers, 'worker')}" if recovery.workers else ""
    return f"recovered: {reason}, {onward}, {duration(recovery.lost_s)} lost"


def joined(rows: Iterable[list[str]]) -> list[list[str]]:
    """Join the rows of a table that differ in the first cell only, which is a rank."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, *cells in rows:
        ranks_of.setdefault(tuple(cells), []).append(int(rank))
    return [[ranks(numbers), *cells] for cells, numbers in ranks_of.items()]


def names(found: Iterable[str]) -> str:
    """Format names of variables: `xs`, `ys`, each in backquotes."""
    return ", ".join(f"`{name}`" for name in found)


def times(number: int) -> str:
    """Format a number of occurrences: `once`, `3 times`."""
    return "once" if number == 1 else f"{number:,} times"


def shortened(text: str, width: int) -> str:
    """Return at most `width` characters of a text."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def ready(workers: int) -> str:
    """Format a number of workers: `1 worker is ready`, `4 workers are ready`."""
    return f"{count(workers, 'worker')} {'is' if workers == 1 else 'are'} ready"
