"""A process's limit of open files is raised as far as it may be, and lowered never."""

from __future__ import annotations

import resource

import pytest

from paceline.machine.devices import allow_open_files

Limits = list[tuple[int, int]]


@pytest.mark.parametrize(
    ("limits", "allowed", "asked"),
    [
        ((256, resource.RLIM_INFINITY), 8192, [(8192, resource.RLIM_INFINITY)]),
        ((1024, 4096), 4096, [(4096, 4096)]),
        ((20_000, 20_000), 20_000, []),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), resource.RLIM_INFINITY, []),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], allowed: int, asked: Limits
) -> None:
    seen: Limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: seen.append(both))
    assert allow_open_files(8192) == allowed
    assert seen == asked


def test_a_system_that_says_no_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert allow_open_files() == 256
