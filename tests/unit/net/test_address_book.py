"""Addresses are tried in the order of what is known of them."""

from __future__ import annotations

from paceline.net.discovery import MAX_FAILURES, AddressBook


def test_the_best_comes_first_and_the_failing_last() -> None:
    book = AddressBook()
    book.failed("fails", "refused", 1.0)
    book.worked("works")
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
    book.worked("x")
    assert book.failures == ()


def test_it_stays_bounded() -> None:
    book = AddressBook()
    for place in range(2 * MAX_FAILURES):
        book.failed(f"f{place}", "refused", float(place))
        book.worked(f"w{place}")
    assert len(book.failures) == MAX_FAILURES
    assert book.order(["w0", f"w{2 * MAX_FAILURES - 1}"])[0] != "w0"
