"""`paceline up` as a service of the system: a unit of systemd, or a property list of launchd, that is started at boot and again after a failure.

As root it is the machine's, else the user's. A file that was not written here is neither overwritten nor removed.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from paceline.cli.options import up_params
from paceline.cli.terminal import Terminal, print_lines
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.files import write_file
from paceline.core.processes import python_command
from paceline.store.home import Home

app = typer.Typer(no_args_is_help=True, help="Run `paceline up` as a service of this machine.")

NAME: Final = "paceline"
MARK: Final = "Written by `paceline service install`"
STOP_S: Final = 15.0
"""What `paceline up` may take to end, beyond `--drain-s`, before it is killed; it promises two."""
MANAGER_S: Final = 120.0
"""Seconds that systemctl or launchctl may take: a stop waits for live answers."""


def unit(args: list[str], home: Path, drain_s: float, *, of_machine: bool) -> str:
    """A unit of systemd. A stop by SIGTERM is no failure; what a person must mend (exit code 2) is not tried again."""
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

[Install]
WantedBy={"multi-user" if of_machine else "default"}.target
"""


def plist(args: list[str], home: Path, drain_s: float) -> bytes:
    """A property list of launchd."""
    return plistlib.dumps(
        {
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


def _from_here(arg: str) -> str:
    """A flag or its value, of which a path means what it means here: a service runs elsewhere, as Python imports from the folder where it runs."""
    flag, equals, value = arg.partition("=") if arg.startswith("--") else ("", "", arg)
    path = Path(value)
    return flag + equals + str(path.absolute()) if path.is_file() or (os.sep in value and path.exists()) else arg


def _quoted(word: str, *, dollars: bool = True) -> str:
    """As systemd reads it back."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), *([("$", "$$")] if dollars else [])):
        word = word.replace(plain, escaped)
    return f'"{word}"'


def place(*, of_machine: bool, is_mac: bool) -> Path:
    """Where the service's file belongs."""
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
) -> None:
    """Write the service's file and start it. All other flags are those of `paceline up`."""
    of_machine, is_mac = os.geteuid() == 0, sys.platform == "darwin"
    args, home, path = (
        [_from_here(arg) for arg in context.args],
        Home.from_environment().root.absolute(),
        place(of_machine=of_machine, is_mac=is_mac),
    )
    if any("\n" in arg or "\0" in arg for arg in (*args, str(home))):
        raise ConfigError("A flag of a service can't have a line break", "Leave it out.")
    drain_s = up_params(context, args)["drain_s"]
    data = plist(args, home, drain_s) if is_mac else unit(args, home, drain_s, of_machine=of_machine).encode()
    if show:
        print_lines(Terminal(), f"# {path}", data.decode())
        return
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
    """Whether the service is installed, and runs. Exit code 1: it does not."""
    is_mac = sys.platform == "darwin"
    path = place(of_machine=os.geteuid() == 0, is_mac=is_mac)
    if not path.exists():
        print_lines(Terminal(), "No service is installed: paceline service install")
        raise typer.Exit(1)
    done = _manager(*(("print", f"{_domain()}/{NAME}") if is_mac else ("status", "--no-pager", path.name)), may_fail=True)
    print_lines(Terminal(), str(path), done.stdout or done.stderr)
    raise typer.Exit(min(done.returncode, 1))
