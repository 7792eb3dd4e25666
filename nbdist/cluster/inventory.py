"""Which hosts there are: named in the line, in a file, or in a profile."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from jupyter_core.paths import jupyter_config_dir

from nbdist.errors import UsageError
from nbdist.records import Host

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HERE = ("localhost", "here")
"""Names of this machine, to which no ssh is needed."""

_WORD = "[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HOST = re.compile(
    rf"(?:(?P<user>{_WORD})@)?(?P<name>{_WORD}|\[[0-9A-Fa-f:.]+\])"
    r"(?::(?P<first>\d+))?(?::(?P<second>\d+))?",
    re.ASCII,
)
PATH = re.compile(r"[~/A-Za-z0-9_][A-Za-z0-9_./+-]*", re.ASCII)
"""A program's path goes through a shell on the host: no sign in it means anything there."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
ADDRESS = re.compile(rf"{_WORD}|[0-9A-Fa-f:.]+", re.ASCII)
_PROFILE = re.compile(_WORD, re.ASCII)
_MOST_PORT = 65535
_DEFAULTS, _HOSTS, _NAME = "defaults", "hosts", "host"
_Fault = tuple[tuple[str, ...], str]
"""The names that lead to it in the file, and what is wrong."""

_KEYS = ("user", "port", "devices", "python", "folder", "address", "env")


def choose(
    words: Sequence[str] = (),
    number: int | None = None,
    file: str | None = None,
    profile: str | None = None,
    python: str | None = None,
) -> tuple[Host, ...]:
    """The hosts that were asked for, one for each engine.

    Args:
        words: `4 hosts`, `4`, or the names of hosts: `gpu1`, `gpu2:8` (8 devices), `me@gpu3:2222`
            (a port), `me@gpu3:2222:8`.
        number: the same as a number.
        file: an inventory (`read`); with a number, its first hosts.
        profile: the name of an inventory among the user's own (`profile_path`).
        python: for all other machines than this one, whose own does not say.

    Raises:
        UsageError: nothing, or something else, was named.
    """
    if file is not None and profile is not None:
        raise UsageError(f"--hosts {file} and --profile {profile}: type one of them")
    path = Path(file).expanduser() if file is not None else None
    if profile is not None:
        path = profile_path(profile)
    by_name = read_named(path) if path is not None else {}
    known = tuple(by_name.values())
    count = count_of(words, number)
    if count is not None:
        if count > len(known) > 0:
            raise UsageError(f"{count} hosts: there are {len(known)} in {path}")
        hosts = known[: max(0, count)] or _here(count)
    elif words:
        hosts = tuple(_named(word, by_name, path) for word in words)
    elif known:
        hosts = known
    else:
        raise UsageError("how many hosts? Type %dist_start 4 hosts, or %dist_start gpu1 gpu2")
    if python is not None:
        hosts = tuple(_with_python(host, python) for host in hosts)
    return hosts


def of(hosts: object) -> tuple[Host, ...]:
    """Hosts as Python's callers name them: a number of them here, or names and records.

    Raises:
        UsageError: they are something else.
    """
    if type(hosts) is int:
        return _here(hosts)
    if not isinstance(hosts, Sequence) or isinstance(hosts, (str, bytes)):
        raise UsageError(f"hosts {hosts!r}: type a whole number, or a list of names")
    return tuple(_checked(host) if isinstance(host, Host) else parse_host(host) for host in hosts)


def _checked(host: Host) -> Host:
    """A record, of which nothing may mean anything to a shell, or be an option."""
    given = {key: value for key in _KEYS if (value := getattr(host, key))}
    faults = [
        f"{key} = {value!r}: {said}"
        for key, value in given.items()
        if (said := _value_fault(key, value))
    ]
    if host.name and not re.fullmatch(rf"{_WORD}|[0-9A-Fa-f:.]+", str(host.name), re.ASCII):
        faults.append(f"name = {host.name!r}: no host is called so")
    if faults:
        raise UsageError("\n".join(faults))
    return host


def resized(before: tuple[Host, ...], hosts: object) -> tuple[Host, ...]:
    """Hosts in the place of others; a number is of those, or of workers on this machine.

    Raises:
        UsageError: so many have no names.
    """
    if type(hosts) is not int or not any(host.name for host in before):
        return of(hosts)
    if not 0 < hosts <= len(before):
        raise UsageError(f"{hosts} hosts: there are {len(before)}; type the names of all")
    return before[:hosts]


def _here(count: int) -> tuple[Host, ...]:
    """So many engines on this machine."""
    if count < 1:
        raise UsageError(f"{count} hosts is too few: type a number from 1")
    return (Host(),) * count


def count_of(words: Sequence[str], number: int | None) -> int | None:
    """The number in `4 hosts`, `4` or `-n 4`; None where hosts are named, or none are."""
    plain = [word for word in words if word not in ("host", "hosts")]
    if number is not None:
        if plain:
            named = " ".join(plain)
            raise UsageError(f"-n {number} and {named!r} both say which hosts: type one of them")
        return number
    if len(plain) == 1 and plain[0].removeprefix("-").isdecimal():
        return int(plain[0])
    if words and not plain:
        raise UsageError("how many hosts? Type %dist_start 4 hosts")
    return None


def parse_host(word: object) -> Host:
    """A host as it is typed.

    Raises:
        UsageError: it is no name that a host could have.
    """
    found = _HOST.fullmatch(word) if isinstance(word, str) else None
    if found is None:
        raise UsageError(
            f"unknown host {word!r}: type a number, or names as in gpu1 gpu2:8 me@gpu3:2222"
        )
    user, name = found["user"] or "", found["name"].strip("[]")
    first, second = found["first"], found["second"]
    port = first if user or second else None
    devices = second or (None if user else first)
    host = Host(name=name, user=user, port=int(port or 0), devices=int(devices or 0))
    if port is not None and not 0 < host.port <= _MOST_PORT:
        raise UsageError(f"host {word!r}: there is no port {port}")
    if devices is not None and not host.devices:
        raise UsageError(f"host {word!r}: type a number of devices from 1")
    if name in HERE and not user and not port:
        return msgspec.structs.replace(host, name="")
    return host


def _named(word: str, known: dict[str, Host], path: Path | None) -> Host:
    """With what the inventory knows of it; the word goes before."""
    typed = parse_host(word)
    if path is None or not typed.name:
        return known.get(HERE[0], typed)
    host = known.get(typed.name)
    if host is None:
        raise UsageError(f"host {word!r}: {path} has {', '.join(known)}")
    said = {n: v for n in ("user", "port", "devices") if (v := getattr(typed, n))}
    return msgspec.structs.replace(host, **said)


def _with_python(host: Host, python: str) -> Host:
    if not PATH.fullmatch(python):
        raise UsageError(f"--python {python!r}: type a path without spaces or signs of a shell")
    return msgspec.structs.replace(host, python=host.python or python)


def profile_path(name: str) -> Path:
    """Where the inventory of this name is: among Jupyter's configuration.

    Raises:
        UsageError: there is none, or it is no name; those that there are are named.
    """
    folder = Path(jupyter_config_dir()) / "nbdist"
    path = folder / f"{name}.toml"
    if not _PROFILE.fullmatch(name) or not path.is_file():
        there = ", ".join(sorted(file.stem for file in folder.glob("*.toml"))) or "none"
        raise UsageError(f"--profile {name}: there is no {path}; profiles: {there}")
    return path


def read(path: Path) -> tuple[Host, ...]:
    """The hosts of an inventory, in its order; see `read_named`."""
    return tuple(read_named(path).values())


def read_named(path: Path) -> dict[str, Host]:
    """The hosts of an inventory, by the names that they have there, in its order.

    It is a file in TOML:

        [defaults]
        python = "~/envs/train/bin/python"

        [hosts.gpu1]
        devices = 8

        [hosts.gpu2]
        host = "me@10.0.0.2:2222"
        address = "192.168.7.2"          # of the fast network
        env = {NCCL_SOCKET_IFNAME = "ib0"}

    Raises:
        UsageError: with one line for each fault, and where it is in the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from None
    faults = [f"{path}:{_line(text, *where)}: {said}" for where, said in _faults(content)]
    if faults:
        raise UsageError("\n".join(faults))
    defaults = content.get(_DEFAULTS, {})
    return {name: _host(name, own, defaults) for name, own in content[_HOSTS].items()}


def _host(name: str, own: dict[str, Any], defaults: dict[str, Any]) -> Host:
    typed = parse_host(own.get(_NAME, name))
    said = {n: v for n in ("user", "port", "devices") if (v := getattr(typed, n))}
    given = {key: value for key, value in own.items() if key != _NAME}
    env = {**defaults.get("env", {}), **own.get("env", {})}
    return Host(name=typed.name, **{**defaults, **given, **said, "env": env})


def _faults(content: dict[str, Any]) -> Iterator[_Fault]:
    for name in content.keys() - {_DEFAULTS, _HOSTS}:
        yield (name,), f"unknown {name!r}: there are [defaults] and [hosts.NAME]"
    hosts = content.get(_HOSTS)
    if not isinstance(hosts, dict) or not hosts:
        yield (_HOSTS,), "no hosts: type [hosts.gpu1], and what is particular to it below"
        hosts = {}
    for name, own in hosts.items():
        where = _HOSTS, name
        if not isinstance(own, dict):
            yield where, f"{name} = {own!r}: type [hosts.{name}]"
            continue
        yield from _name_faults(where, own)
        yield from _key_faults(where, own, (*_KEYS, _NAME))
    defaults = content.get(_DEFAULTS, {})
    if not isinstance(defaults, dict):
        yield (_DEFAULTS,), f"defaults = {defaults!r}: type [defaults]"
    else:
        yield from _key_faults((_DEFAULTS,), defaults, _KEYS)


def _name_faults(
    where: tuple[str, str], own: dict[str, Any]
) -> Iterator[tuple[tuple[str, ...], str]]:
    typed = own.get(_NAME, where[1])
    place = (*where, _NAME) if _NAME in own else where
    if not isinstance(typed, str):
        yield place, f"host = {typed!r}: type a name in quotes"
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
            yield (*where, key), f"unknown key {key!r}: there are {', '.join(keys)}"
        elif said := _value_fault(key, value):
            yield (*where, key), f"{key} = {value!r}: {said}"


def _value_fault(key: str, value: Any) -> str:
    """What is wrong with it; empty where nothing is."""
    if key in ("port", "devices"):
        most = _MOST_PORT if key == "port" else 1 << 20
        whole = type(value) is int and 0 < value <= most
        return "" if whole else f"type a whole number from 1 to {most}"
    if key == "env":
        pairs = value.items() if isinstance(value, dict) else [("", "")]
        good = all(_VARIABLE.fullmatch(n) and _is_line(v) for n, v in pairs)
        return "" if good else 'type {NAME = "value"}'
    if not _is_line(value):
        return "type text in quotes, on one line"
    forms = {"python": PATH, "address": ADDRESS, "user": _PROFILE}
    if key in forms and not forms[key].fullmatch(value):
        return "it has signs that mean something to a shell, or begins with one"
    return ""


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _line(text: str, *where: str) -> int:
    """The line of the file where what these names lead to is, as near as can be told."""
    last = 1
    lines = text.splitlines()
    for name in where:
        word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
        later = (n for n, line in enumerate(lines[last - 1 :], last) if word.search(line))
        last = next(later, last)
    return last
