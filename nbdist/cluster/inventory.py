"""Selection of hosts: from the command line, an inventory file, or a profile."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from jupyter_core.paths import jupyter_config_dir

from nbdist.cluster import tpu_slices
from nbdist.errors import UsageError
from nbdist.records import Host, Sync

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HERE = ("localhost", "here")
"""Names of this machine, which needs no ssh."""

_COUNTED = ("host", "worker", "machine", "node", "rank", "engine")
"""Nouns after a number of hosts; also their plurals."""

_NUMBERS = "one two three four five six seven eight nine ten eleven twelve"
_SPELLED = {word: number for number, word in enumerate(_NUMBERS.split(), 1)}
_NUMBERED = re.compile(rf"(\d+|{'|'.join(_SPELLED)})(s|{'|'.join(_COUNTED)})*", re.IGNORECASE)
"""A number, also with a noun attached to it."""

_WORD = "[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HOST = re.compile(
    rf"(?:(?P<user>{_WORD})@)?(?P<name>{_WORD}|\[[0-9A-Fa-f:.]+\])"
    r"(?::(?P<first>\d+))?(?::(?P<second>\d+))?",
    re.ASCII,
)
PATH = re.compile(r"[~/A-Za-z0-9_][A-Za-z0-9_./+-]*", re.ASCII)
"""Form of a program's path. A shell on the host reads it, so it contains no special characters."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
ADDRESS = re.compile(rf"{_WORD}|[0-9A-Fa-f:.]+", re.ASCII)
_PROFILE = re.compile(_WORD, re.ASCII)
_MOST_PORT = 65535
_DEFAULTS, _HOSTS, _NAME = "defaults", "hosts", "host"
_SYNC, _FOLDERS, _EXCLUDE = "sync", "folders", "exclude"
_Fault = tuple[tuple[str, ...], str]
"""Path of keys in the file, and the description of the fault."""

_KEYS = ("user", "port", "devices", "python", "folder", "address", "env")


def choose(
    words: Sequence[str] = (),
    number: int | None = None,
    file: str | None = None,
    profile: str | None = None,
    python: str | None = None,
) -> tuple[Host, ...]:
    """Return the requested hosts, one for each engine.

    Args:
        words: `4 hosts`, `four workers`, `4`, or the names of hosts: `gpu1`, `gpu2:8` (8 devices),
            `me@gpu3:2222` (a port), `me@gpu3:2222:8`. `tpu` is all hosts of this machine's TPU
            slices. Other words next to it are hosts of other slices (`tpu_slices.find`).
        number: the number of hosts, as an alternative to a number in `words`.
        file: the path of an inventory (`read`). A number selects its first hosts.
        profile: the name of an inventory of the user (`profile_path`).
        python: the path of Python on hosts for which the inventory sets none.

    Raises:
        UsageError: the arguments select no hosts, or are invalid.
    """
    if file is not None and profile is not None:
        raise UsageError(f"--hosts {file} and --profile {profile} exclude each other: use one")
    path = Path(file).expanduser() if file is not None else None
    if profile is not None:
        path = profile_path(profile)
    by_name = read_named(path) if path is not None else {}
    known = tuple(by_name.values())
    count = count_of(words, number)
    if count is not None:
        if count > len(known) > 0:
            raise UsageError(f"{count} hosts requested, but only {len(known)} are in {path}")
        hosts = known[: max(0, count)] or _here(count)
    elif path is None and tpu_slices.NAME in words:
        hosts = _of_slices(words, python)
    elif words:
        hosts = tuple(_named(word, by_name, path) for word in words)
    elif known:
        hosts = known
    else:
        raise UsageError(
            "no hosts requested: run %dist_start 4 hosts, or name hosts as in %dist_start gpu1 gpu2"
        )
    if python is not None:
        hosts = tuple(_with_python(host, python) for host in hosts)
    return hosts


def of(hosts: object) -> tuple[Host, ...]:
    """Return the hosts of a Python call.

    Args:
        hosts: a number of engines on this machine, `tpu`, or a sequence of names and `Host`
            records. `tpu` is the hosts of this machine's TPU slices.

    Raises:
        UsageError: the hosts are invalid.
    """
    if type(hosts) is int:
        return _here(hosts)
    words = [hosts] if hosts == tpu_slices.NAME else hosts
    if isinstance(words, Sequence) and tpu_slices.NAME in words:
        return _of_slices([str(word) for word in words])
    if not isinstance(hosts, Sequence) or isinstance(hosts, (str, bytes)):
        raise UsageError(f"hosts {hosts!r}: use a whole number, or a list of names")
    return tuple(_checked(host) if isinstance(host, Host) else parse_host(host) for host in hosts)


def _of_slices(words: Sequence[str], python: str | None = None) -> tuple[Host, ...]:
    """Return the hosts of this machine's TPU slices, of words with `tpu`."""

    def host(word: str) -> Host:
        return _with_python(parse_host(word), python) if python else parse_host(word)

    others = [word for word in words if word != tpu_slices.NAME]
    return tuple(map(_checked, tpu_slices.find(others, host)))


def _checked(host: Host) -> Host:
    """Return the record. Refuse values that a shell would interpret or ssh read as options."""
    given = {key: value for key in _KEYS if (value := getattr(host, key))}
    faults = [
        f"{key} = {value!r}: {fault}"
        for key, value in given.items()
        if (fault := _value_fault(key, value))
    ]
    if host.name and not re.fullmatch(rf"{_WORD}|[0-9A-Fa-f:.]+", str(host.name), re.ASCII):
        faults.append(f"name = {host.name!r}: not a valid host name")
    if faults:
        raise UsageError("\n".join(faults))
    return host


def resized(before: tuple[Host, ...], hosts: object) -> tuple[Host, ...]:
    """Return the hosts of a resized cluster.

    Args:
        before: the current hosts.
        hosts: the new hosts. A number selects the first of `before` if these have names, else it
            is a number of engines on this machine.

    Raises:
        UsageError: the hosts are invalid, or the number exceeds the named hosts.
    """
    if type(hosts) is not int or not any(host.name for host in before):
        return of(hosts)
    if not 0 < hosts <= len(before):
        raise UsageError(
            f"{hosts} hosts requested, but {len(before)} have names: list the names of all hosts"
        )
    return before[:hosts]


def _here(count: int) -> tuple[Host, ...]:
    """Return this machine `count` times, once for each engine."""
    if count < 1:
        raise UsageError(f"need at least 1 host, got {count}")
    return (Host(),) * count


def count_of(words: Sequence[str], number: int | None) -> int | None:
    """Return the number in `4 hosts`, `four workers`, `4` or `-n 4`; None if hosts are named.

    Raises:
        UsageError: the words contain a number in another form. It is never the name of a host.
    """
    plain = [word for word in words if not _is_noun(word)]
    if number is not None:
        if plain:
            named = " ".join(plain)
            raise UsageError(f"-n {number} and {named!r} both select hosts: use one of them")
        return number
    if len(plain) == 1 and plain[0].removeprefix("-").isdecimal():
        return int(plain[0])
    if len(plain) == 1 < len(words) and plain[0].lower() in _SPELLED:
        return _SPELLED[plain[0].lower()]
    if any(map(_NUMBERED.fullmatch, plain)) and not (len(words) == 1 and words[0] in _SPELLED):
        raise UsageError(
            f"{' '.join(words)!r} is neither a number of hosts nor their names: run "
            "%dist_start 4 hosts, or name hosts as in %dist_start gpu1 gpu2"
        )
    if words and not plain and any(word.lower() not in _COUNTED[1:] for word in words):
        raise UsageError("the number of hosts is missing: run %dist_start 4 hosts")
    return None


def _is_noun(word: str) -> bool:
    return word.lower().removesuffix("s") in _COUNTED


def parse_host(word: object) -> Host:
    """Parse a host: `[USER@]NAME[:PORT][:DEVICES]`. Without a user, one number is the devices.

    Raises:
        UsageError: the word is not a valid host.
    """
    found = _HOST.fullmatch(word) if isinstance(word, str) else None
    if found is None or found["name"].isdecimal():
        raise UsageError(
            f"invalid host {word!r}: use a number, or names as in gpu1 gpu2:8 me@gpu3:2222"
        )
    user, name = found["user"] or "", found["name"].strip("[]")
    first, second = found["first"], found["second"]
    port = first if user or second else None
    devices = second or (None if user else first)
    host = Host(name=name, user=user, port=int(port or 0), devices=int(devices or 0))
    if port is not None and not 0 < host.port <= _MOST_PORT:
        raise UsageError(f"host {word!r}: port {port} is invalid, use 1 to 65535")
    if devices is not None and not host.devices:
        raise UsageError(f"host {word!r}: need at least 1 device")
    if name in HERE and not user and not port:
        return msgspec.structs.replace(host, name="")
    return host


def _named(word: str, known: dict[str, Host], path: Path | None) -> Host:
    """Return a host with the inventory's values. The values in the word take precedence."""
    typed = parse_host(word)
    if path is None or not typed.name:
        return known.get(HERE[0], typed)
    host = known.get(typed.name)
    if host is None:
        raise UsageError(f"host {word!r} is not in {path}, which contains {', '.join(known)}")
    explicit = {n: v for n in ("user", "port", "devices") if (v := getattr(typed, n))}
    return msgspec.structs.replace(host, **explicit)


def _with_python(host: Host, python: str) -> Host:
    if not PATH.fullmatch(python):
        raise UsageError(
            f"--python {python!r}: use a path without spaces or special characters of a shell"
        )
    return msgspec.structs.replace(host, python=host.python or python)


def profile_path(name: str) -> Path:
    """Return the path of a profile: an inventory in the folder of Jupyter's configuration.

    Raises:
        UsageError: the name is invalid, or there is no such profile. The message lists all
            profiles.
    """
    folder = Path(jupyter_config_dir()) / "nbdist"
    path = folder / f"{name}.toml"
    if not _PROFILE.fullmatch(name) or not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.toml")))
        remedy = f"use one of {known}" if known else "create it (docs/clusters.md)"
        raise UsageError(f"--profile {name}: {path} does not exist: {remedy}")
    return path


def read(path: Path) -> tuple[Host, ...]:
    """Return the hosts of an inventory, in its order; see `read_named`."""
    return tuple(read_named(path).values())


def sync_of(file: str | None = None, profile: str | None = None) -> Sync:
    """Return the choice of the user's own modules in an inventory; the default without one.

    Relative folders are relative to the inventory.

    Args:
        file: the path of an inventory.
        profile: the name of an inventory of the user.

    Raises:
        UsageError: the inventory has faults, or a folder does not exist.
    """
    if file is None and profile is None:
        return Sync()
    path = profile_path(profile) if profile is not None else Path(file or "").expanduser()
    given = _content(path).get(_SYNC, {})
    folders = [path.absolute().parent / Path(name).expanduser() for name in given.get(_FOLDERS, ())]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise UsageError(f"{path}: no such folder in [sync]: {', '.join(missing)}")
    return Sync(folders=tuple(map(str, folders)), exclude=tuple(given.get(_EXCLUDE, ())))


def read_named(path: Path) -> dict[str, Host]:
    """Return the hosts of an inventory by their names in it, in its order.

    The inventory is a TOML file:

        [defaults]
        python = "~/envs/train/bin/python"

        [hosts.gpu1]
        devices = 8

        [hosts.gpu2]
        host = "me@10.0.0.2:2222"
        address = "192.168.7.2"          # of the fast network
        env = {NCCL_SOCKET_IFNAME = "ib0"}

        [sync]                           # see `sync_of`
        folders = ["~/library"]
        exclude = ["*.bin"]

    Raises:
        UsageError: the file has faults. The message contains one line for each, with its line in
            the file.
    """
    content = _content(path)
    defaults = content.get(_DEFAULTS, {})
    return {name: _host(name, own, defaults) for name, own in content[_HOSTS].items()}


def _content(path: Path) -> dict[str, Any]:
    """Return the content of an inventory. Raise UsageError with all its faults."""
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    faults = [f"{path}:{_line(text, *where)}: {fault}" for where, fault in _faults(content)]
    if faults:
        raise UsageError("\n".join(faults))
    return content


def _host(name: str, own: dict[str, Any], defaults: dict[str, Any]) -> Host:
    typed = parse_host(own.get(_NAME, name))
    explicit = {n: v for n in ("user", "port", "devices") if (v := getattr(typed, n))}
    given = {key: value for key, value in own.items() if key != _NAME}
    env = {**defaults.get("env", {}), **own.get("env", {})}
    return Host(name=typed.name, **{**defaults, **given, **explicit, "env": env})


def _faults(content: dict[str, Any]) -> Iterator[_Fault]:
    for name in content.keys() - {_DEFAULTS, _HOSTS, _SYNC}:
        yield (name,), f"unknown {name!r}: use [defaults], [sync] or [hosts.NAME]"
    hosts = content.get(_HOSTS)
    if not isinstance(hosts, dict) or not hosts:
        yield (_HOSTS,), "no hosts: add a section such as [hosts.gpu1], with its settings below"
        hosts = {}
    for name, own in hosts.items():
        where = _HOSTS, name
        if not isinstance(own, dict):
            yield where, f"{name} = {own!r}: use a section [hosts.{name}]"
            continue
        yield from _name_faults(where, own)
        yield from _key_faults(where, own, (*_KEYS, _NAME))
    defaults = content.get(_DEFAULTS, {})
    if not isinstance(defaults, dict):
        yield (_DEFAULTS,), f"defaults = {defaults!r}: use a section [defaults]"
    else:
        yield from _key_faults((_DEFAULTS,), defaults, _KEYS)
    sync = content.get(_SYNC, {})
    if not isinstance(sync, dict):
        yield (_SYNC,), f"sync = {sync!r}: use a section [sync]"
    else:
        yield from _key_faults((_SYNC,), sync, (_FOLDERS, _EXCLUDE))


def _name_faults(
    where: tuple[str, str], own: dict[str, Any]
) -> Iterator[tuple[tuple[str, ...], str]]:
    typed = own.get(_NAME, where[1])
    place = (*where, _NAME) if _NAME in own else where
    if not isinstance(typed, str):
        yield place, f"host = {typed!r}: use a name in quotes"
        return
    try:
        parse_host(typed)
    except UsageError as error:
        yield place, str(error)


def _key_faults(
    where: tuple[str, ...], given: dict[str, Any], keys: Iterable[str]
) -> Iterator[_Fault]:
    for key, value in given.items():
        if key not in keys:
            yield (*where, key), f"unknown key {key!r}: use {', '.join(keys)}"
        elif fault := _value_fault(key, value):
            yield (*where, key), f"{key} = {value!r}: {fault}"


def _value_fault(key: str, value: Any) -> str:
    """Return the remedy for an invalid value; empty if the value is valid."""
    if key in ("port", "devices"):
        most = _MOST_PORT if key == "port" else 1 << 20
        whole = type(value) is int and 0 < value <= most
        return "" if whole else f"use a whole number from 1 to {most}"
    if key == "env":
        pairs = value.items() if isinstance(value, dict) else [("", "")]
        good = all(_VARIABLE.fullmatch(n) and _is_line(v) for n, v in pairs)
        return "" if good else 'use {NAME = "value"}'
    if key in (_FOLDERS, _EXCLUDE):
        good = isinstance(value, list) and all(_is_line(each) for each in value)
        return "" if good else 'use a list of texts, as in ["data", "*.bin"]'
    if not _is_line(value):
        return "use text in quotes, on one line"
    forms = {"python": PATH, "address": ADDRESS, "user": _PROFILE}
    if key in forms and not forms[key].fullmatch(value):
        return "remove special characters of a shell, also at the start"
    return ""


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _line(text: str, *where: str) -> int:
    """Return the line of the file with the value at this path of keys, as a best guess."""
    last = 1
    lines = text.splitlines()
    for name in where:
        word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
        later = (n for n, line in enumerate(lines[last - 1 :], last) if word.search(line))
        last = next(later, last)
    return last
