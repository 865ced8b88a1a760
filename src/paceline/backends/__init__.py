"""Run layers on this machine."""

import os
import sys
from typing import Any

_SETTINGS = ".numba_config.yaml"


def _read_no_settings() -> None:
    """Import Numba so that it reads no settings from the current folder, which may be untrusted: settings name caches, and caches are pickles.

    Numba reads the file when it is imported, if it can import YAML then, and does not try again later.
    """
    yaml = sys.modules.get("yaml")
    sys.modules["yaml"] = None  # type: ignore[assignment]  # makes its import fail
    try:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from numba.core import config
        settings: Any = config
        settings._config_fname = ""  # noqa: SLF001 - Numba has no setting for it
    finally:
        if yaml is None:
            del sys.modules["yaml"]
        else:
            sys.modules["yaml"] = yaml


if os.path.exists(_SETTINGS):  # noqa: PTH110 - every import of a backend comes by here
    _read_no_settings()
