"""Addresses are tried in the order of what is known of them."""

from __future__ import annotations

import pytest

from paceline.net.discovery import MAX_FAILURES, AddressBook


def test_the_best_comes_first_and_the_failing_last() -> None:
    book = AddressBook()
    book.failed("fails", "refused", 1.0)
    book.worked("works", "n1")
    book.prefer(["best"])
    assert book.order(["fails", "new", "works", "best"]) == ("best", "works", "new", "fails")


def test_order_and_duplicates() -> None:
    assert AddressBook().order(["b", "a", "b"]) == ("b", "a")


def test_a_failure_is_kept_until_it_works() -> None:
    book = AddressBook()
    book.failed("x", "refused", 1.0)
    book.failed("x", "timed out", 2.0)
    (failure,) = book.failures
    assert (failure.error, failure.since) == ("timed out", 1.0)
    book.worked("x", "n1")
    assert book.failures == ()


def test_it_stays_bounded() -> None:
    book = AddressBook()
    for place in range(2 * MAX_FAILURES):
        book.failed(f"f{place}", "refused", float(place))
        book.worked(f"w{place}", "n1")
    assert len(book.failures) == MAX_FAILURES
    assert book.order(["w0", f"w{2 * MAX_FAILURES - 1}"])[0] != "w0"


@pytest.mark.parametrize(
    ("answered", "error", "named"),
    [
        (["n1"], "a:1 can't be reached", "n1"),
        (["n1", "n2"], "a:1 can't be reached", "n2"),
        (["n1"], "n1 at a:1 is silent", "n1"),
        ([], "a:1 is silent", ""),
    ],
)
def test_an_address_that_fails_names_the_node_that_answered_there_last(answered: list[str], error: str, named: str) -> None:
    book = AddressBook()
    for node_id in answered:
        book.worked("a:1", node_id)
    for now in (1.0, 2.0):
        book.failed("a:1", error, now)
    (failure,) = book.failures
    assert error in failure.error
    assert failure.error.count("n1") + failure.error.count("n2") == bool(named)
    assert named in failure.error
    assert failure.since == 1.0
