"""Takes out of a text what says whose machine it is: names of user and host, folders, values of secret variables.

A proof's report is attached to public bug reports. Its fields are chosen one by one, and none of them is meant to name
a person or a place; but texts of drivers and of the system may. So every string of the report goes through a
``Scrubber`` last.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_SECRET: Final = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|PRIVATE|(?:^|_)KEY(?:$|_)", re.IGNORECASE)
_SHORTEST_SECRET: Final = 6  # characters; a shorter value, such as 0 or true, is no secret
# Names that say nothing of a person or a machine; from ok on, words of the report.
_NOBODY: Final = frozenset({"root", "localhost", "", "ok", "failed", "refused", "pass", "finished", "check", "cpu"})


class Scrubber:
    """Replaces what identifies a user or a machine by a word in square brackets, which Markdown shows as it stands.

    folders: further folders and the words that stand for them. environment, home, names: None for this process's own.
    names: words that are replaced wherever they stand alone, and what stands for them.
    """

    def __init__(
        self,
        folders: Mapping[Path, str] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        home: Path | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        known = os.environ if environment is None else environment
        homes = [home] if home else [Path(known[name]) for name in ("HOME", "USERPROFILE") if known.get(name)]
        with suppress(RuntimeError):  # this user has none
            homes += [] if home else [Path.home()]
        words = {**(folders or {}), **dict.fromkeys(homes, "[home]")}
        pieces = {str(path): word for one, word in words.items() for path in (one, one.resolve())}
        secrets = [x for name, x in known.items() if _SECRET.search(name) and len(x) >= _SHORTEST_SECRET]
        pieces |= dict.fromkeys(secrets, "[secret]")
        self._pieces = {piece: word for piece, word in pieces.items() if len(piece) > 1}  # a home folder may be /
        self._names = _names(known) if names is None else dict(names)

    def text(self, text: str) -> str:
        """The text without them. Longer pieces go first, so that a folder within the home folder keeps its word."""
        for piece in sorted(self._pieces, key=len, reverse=True):
            text = text.replace(piece, self._pieces[piece])
        text = re.sub(r"(?<![\w.])/(?:home|Users)/[^/\s'\"]+", "[home]", text)  # another user's, in a build's path
        for name in sorted(self._names, key=len, reverse=True):
            text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", self._names[name], text)
        return text

    def value(self, value: Any) -> Any:
        """A JSON value with every string of it scrubbed; the keys of objects stay."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.value(one) for key, one in value.items()}
        return [self.value(one) for one in value] if isinstance(value, list | tuple) else value


def _names(environment: Mapping[str, str]) -> dict[str, str]:
    """Names of the user and of the host, and what stands for them."""
    users = {environment.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    with suppress(KeyError, OSError):  # a user without a name, in a container
        users.add(getpass.getuser())
    hosts = {socket.gethostname(), platform.node(), environment.get("HOSTNAME", "")}
    found = dict.fromkeys(users, "[user]") | dict.fromkeys({*hosts, *(host.split(".")[0] for host in hosts)}, "[host]")
    return {name: word for name, word in found.items() if name not in _NOBODY and not name.isdigit()}
