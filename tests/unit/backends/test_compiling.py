"""Functions for compiled code alone."""

from __future__ import annotations

import pytest
from numba import njit

from paceline.backends.compiling import inner


@inner
def doubled(x: int) -> int:
    return 2 * x


def test_python_is_refused_and_compiled_code_is_not() -> None:
    @njit
    def twice_doubled(x: int) -> int:
        return doubled(doubled(x))

    assert twice_doubled(3) == 12
    with pytest.raises(TypeError, match="doubled is for compiled code"):
        doubled(3)
