"""What Numba compiles, optimised once.

By itself Numba optimises each function, makes machine code of it and a way in from Python, and then takes it into the function that calls it, where all of that is
done again. Here a function that compiled code alone calls (`inner`) waits as it was lowered; it is optimised in what Python calls, and only there is it machine
code. The operations are the same, so no byte differs. This is by Numba's insides, which is why its version is pinned to the digit.

Imported before anything is compiled: by whatever has functions to compile.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from numba import njit
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.registry import CPUDispatcher, cpu_target


class _Inner(CPUDispatcher):
    """Has no way in from Python: a call would jump to nowhere."""

    def __call__(self, *_: Any, **__: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise TypeError(f"{self.py_func.__qualname__} is for compiled code: call it there, or njit(function.py_func)")


def inner(function: Any = None, **options: Any) -> Any:
    """`njit` of a function that compiled code alone calls. From Python, a call of it is a `TypeError`."""
    if function is None:
        return partial(inner, **options)
    made = cast("Any", njit)(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)
    made.__class__ = _Inner
    return made


class _Library(JITCodeLibrary):
    """A function and those that it calls. Machine code when it is asked for."""

    _waits = False

    def _optimize_final_module(self) -> None:
        self._waits = True

    def _finalize_final_module(self) -> None:
        if self._waits:
            self._finalize_dynamic_globals()
            self._finalized = True
        else:  # read from where it was kept
            super()._finalize_final_module()

    def _make(self) -> None:
        if self._waits:
            self._waits = False
            super()._optimize_final_module()
            self._final_module.verify()
            self._dynamic_globals.clear()  # found again, by what follows
            super()._finalize_final_module()

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        if self._waits and all(function.name != name for function in self.get_defined_functions()):
            return 0
        self._make()
        return super().get_pointer_to_function(name)

    def _get_compiled_object(self) -> bytes:
        self._make()
        return super()._get_compiled_object()


class _Codegen(JITCPUCodegen):
    _library_class = _Library

    def set_env(self, env_name: str, env: Any) -> None:
        if self._engine.is_symbol_defined(env_name):
            super().set_env(env_name, env)


_target: Any = cpu_target.target_context
_target._internal_codegen = _Codegen("paceline")  # noqa: SLF001 - Numba has no setting for it
