"""`paceline up` as a service of the system: a unit of systemd, or a property list of launchd, that is started at boot and again after a failure.

As root it is the machine's, else the user's. A file that was not written here is neither overwritten nor removed.
"""

from __future__ import annotations

import os
import plistlib
import pwd
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer

import paceline
from paceline.cli.options import up_params
from paceline.cli.terminal import Terminal, print_lines
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.files import write_file
from paceline.core.processes import python_command
from paceline.store.home import Home

app = typer.Typer(no_args_is_help=True, help="Run `paceline up` as a service of this machine.")

NAME: Final = "paceline"
MARK: Final = "Written by `paceline service install`"
EXAMPLE_USER: Final = "paceline"
"""In a unit that is only printed."""
PROTECTIONS: Final = """NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
RestrictSUIDSGID=yes
"""
STOP_S: Final = 15.0
"""Seconds that `paceline up` gets to end, beyond `--drain-s`, before it is killed. It promises two."""
MANAGER_S: Final = 120.0
"""Seconds that systemctl or launchctl may take: a stop waits for live answers."""


def unit(args: list[str], home: Path, drain_s: float, *, of_machine: bool, user: str = EXAMPLE_USER) -> str:
    """Return a unit of systemd. A stop by SIGTERM does not count as a failure; an error that a person must mend (exit code 2) causes no restart.

    Args:
        user: runs the machine's service, which writes nothing but the home. A user's own service runs as that user.
    """
    protections = f"User={user}\n{PROTECTIONS}ReadWritePaths={_quoted(str(home), dollars=False)}" if of_machine else "NoNewPrivileges=yes"
    command = " ".join(_quoted(arg) for arg in python_command("-m", "paceline", "up", *args))
    return f"""# {MARK}
[Unit]
Description=Paceline, one OpenAI endpoint out of the machines you own
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={command}
Environment={_quoted(f"PACELINE_HOME={home}", dollars=False)}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2
SuccessExitStatus=130 143
KillMode=mixed
TimeoutStopSec={drain_s + STOP_S:g}
LimitNOFILE=8192
{protections}

[Install]
WantedBy={"multi-user" if of_machine else "default"}.target
"""


def plist(args: list[str], home: Path, drain_s: float, user: str = "") -> bytes:
    """Return a property list of launchd. `user`: runs the machine's service."""
    return plistlib.dumps(
        {
            **({"UserName": user} if user else {}),
            "Label": NAME,
            "Comment": MARK,
            "ProgramArguments": python_command("-m", "paceline", "up", *args),
            "EnvironmentVariables": {"PACELINE_HOME": str(home)},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 5,
            "ExitTimeOut": int(drain_s + STOP_S),
        }
    )


def check_code(paths: Iterable[Path], uid: int, gid: int) -> None:
    """Refuse code that others than root and the service's user may change: they would run as that user.

    Args:
        paths: files and folders that are run. The folders above them count too, and those that links lead to.
        gid: the user's own group.

    Raises:
        ConfigError: a path belongs to another user, or others may write it.
    """
    for path in dict.fromkeys(each for start in paths for each in (start, *start.parents, start.resolve(), *start.resolve().parents)):
        found = path.stat()
        # Where the sticky bit is set, others can't replace what is not theirs.
        by_group = found.st_mode & stat.S_IWGRP and found.st_gid not in {0, gid}
        by_others = (by_group or found.st_mode & stat.S_IWOTH) and not (path.is_dir() and found.st_mode & stat.S_ISVTX)
        if found.st_uid not in {0, uid} or by_others:
            raise ConfigError(
                f"{path} can be changed by others than root and the service's user, who would then run as that user",
                "Install Paceline where only root writes, such as /opt/paceline, or as the service's user.",
            )


def _account(name: str) -> pwd.struct_passwd:
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"There is no user {name!r} on this machine", "Make one: useradd --system --create-home paceline") from None
    if account.pw_uid == 0:
        raise ConfigError("The service needs no rights of root", "Give the name of another user.")
    return account


def _home_of(account: pwd.struct_passwd) -> Path:
    """Return the home that a user's `paceline up` has."""
    return Path(os.environ.get("PACELINE_HOME") or Path(account.pw_dir) / ".paceline").absolute()


def _from_here(arg: str) -> str:
    """Return a flag or its value. A path among them means what it means in the current folder: a service runs elsewhere."""
    flag, equals, value = arg.partition("=") if arg.startswith("--") else ("", "", arg)
    path = Path(value)
    return flag + equals + str(path.absolute()) if path.is_file() or (os.sep in value and path.exists()) else arg


def _quoted(word: str, *, dollars: bool = True) -> str:
    """Quote a word for systemd."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), *([("$", "$$")] if dollars else [])):
        word = word.replace(plain, escaped)
    return f'"{word}"'


def place(*, of_machine: bool, is_mac: bool) -> Path:
    """Return the path of the service's file."""
    if is_mac:
        return (Path("/Library/LaunchDaemons") if of_machine else Path.home() / "Library/LaunchAgents") / f"{NAME}.plist"
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return (Path("/etc/systemd/system") if of_machine else config / "systemd/user") / f"{NAME}.service"


def put(path: Path, data: bytes) -> None:
    """Write a service's file, which its owner alone may read: flags may have a key.

    Raises:
        ConfigError: there is one that was not written here.
    """
    _check_own(path)
    write_file(path, data)


def _check_own(path: Path) -> None:
    if path.exists() and MARK.encode() not in path.read_bytes():
        raise ConfigError(f"{path} was not written by Paceline", "Move it away first; Paceline leaves it as it is.")


def _manager(*args: str, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
    of_machine, is_mac = os.geteuid() == 0, sys.platform == "darwin"
    program = "launchctl" if is_mac else "systemctl"
    if shutil.which(program) is None or not (is_mac or Path("/run/systemd/system").is_dir()):
        raise ConfigError("Neither systemd nor launchd runs this machine", "`paceline service install --print` shows a unit to adapt.")
    command = [program, *([] if of_machine or is_mac else ["--user"]), *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MANAGER_S)  # noqa: S603 - names and paths of ours
    except subprocess.TimeoutExpired as error:
        raise PacelineError(f"{' '.join(command)} took longer than {MANAGER_S:g} s", "See the system's log.") from error
    if done.returncode and not may_fail:
        raise PacelineError(f"{' '.join(command)} failed: {done.stderr.strip()}", "See the system's log.")
    return done


def _domain() -> str:
    return "system" if os.geteuid() == 0 else f"gui/{os.geteuid()}"


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def install(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--print", help="Print the file, and change nothing.")] = False,
    user: Annotated[str, typer.Option("--user", help="Runs the machine's service. Needed as root, and then alone.")] = "",
) -> None:
    """Write the service's file and start it. All other flags are those of `paceline up`."""
    of_machine, is_mac = os.geteuid() == 0, sys.platform == "darwin"
    if user and not of_machine:
        raise ConfigError("--user is for the machine's service, which root installs", "Leave it out: the service runs as you.")
    if of_machine and not (user or show):
        raise ConfigError(
            "As root, this would be the machine's service, and it needs a user to run as",
            "Give --user NAME; the service writes nothing but that user's Paceline home.",
        )
    account = _account(user) if user else None
    args, home, path = (
        [_from_here(arg) for arg in context.args],
        Home.from_environment().root.absolute() if account is None else _home_of(account),
        place(of_machine=of_machine, is_mac=is_mac),
    )
    if not all(word.isprintable() for word in (*args, str(home))):
        raise ConfigError("A flag of a service can't have a line break or another control character", "Leave it out.")
    drain_s = up_params(context, args)["drain_s"]
    runs_as = user or EXAMPLE_USER
    data = (
        plist(args, home, drain_s, runs_as if of_machine else "")
        if is_mac
        else unit(args, home, drain_s, of_machine=of_machine, user=runs_as).encode()
    )
    if account is not None:
        packages = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")}
        code = [
            Path(python_command()[0]),
            Path(paceline.__file__).parent,
            *packages,
            *(each for folder in packages for each in folder.iterdir()),
        ]
        check_code(code, account.pw_uid, account.pw_gid)
    if show:
        print_lines(Terminal(), f"# {path}", data.decode())
        return
    if account is not None and not home.exists():
        home.mkdir(mode=0o700)
        os.chown(home, account.pw_uid, account.pw_gid, follow_symlinks=False)
    if is_mac:
        _check_own(path)
        _manager("bootout", f"{_domain()}/{NAME}", may_fail=True)
        put(path, data)
        _manager("bootstrap", _domain(), str(path))
    else:
        _manager("--version")  # before a file is written
        put(path, data)
        _manager("daemon-reload")
        _manager("enable", path.name)
        _manager("restart", path.name)
    print_lines(Terminal(), f"{path} is written, and the service runs: paceline service status")


@app.command()
def uninstall() -> None:
    """Stop the service, and remove its file."""
    is_mac = sys.platform == "darwin"
    path = place(of_machine=os.geteuid() == 0, is_mac=is_mac)
    _check_own(path)
    if not path.exists():
        raise ConfigError(f"There is no {path}", "Nothing is installed.")
    _manager(*(("bootout", f"{_domain()}/{NAME}") if is_mac else ("disable", "--now", path.name)), may_fail=is_mac)
    path.unlink()
    if not is_mac:
        _manager("daemon-reload")
    print_lines(Terminal(), f"{path} is removed")


@app.command()
def status() -> None:
    """Show whether the service is installed and runs. Exit code 1: it does not."""
    is_mac = sys.platform == "darwin"
    path = place(of_machine=os.geteuid() == 0, is_mac=is_mac)
    if not path.exists():
        print_lines(Terminal(), "No service is installed: paceline service install")
        raise typer.Exit(1)
    done = _manager(*(("print", f"{_domain()}/{NAME}") if is_mac else ("status", "--no-pager", path.name)), may_fail=True)
    print_lines(Terminal(), str(path), done.stdout or done.stderr)
    raise typer.Exit(min(done.returncode, 1))
