"""Numba, made to compile each function once.

Left alone, Numba optimises each function, makes machine code and a Python entry of it, then links it into its callers and does all of that again.
Here a function that only compiled code calls (`inner`) stays as it was lowered until the function that Python calls is optimised.

Three more savings, together half of the processor time:

- A function is compiled for types, not for the constants that some callers pass.
- The type of an operation is looked up once for the same operands; Numba tries every overload again at each place in the code.
- Functions are not simplified before they are linked: the optimisation of the whole begins with the same passes.

The operations are the same, so no byte differs. All of this uses Numba's internals, so its version is pinned exactly.

Every module that has functions to compile imports this one first.
"""

from __future__ import annotations

from typing import Any, cast

from numba import njit
from numba.core import types
from numba.core.caching import Cache
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.runtime.nrt import rtsys
from numba.core.types.functions import BaseFunction


class _Inner(CPUDispatcher):
    """A function without a Python entry: a call from there would jump to nowhere."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return super().get_call_template(
            [types.unliteral(each) for each in args], {name: types.unliteral(each) for name, each in kws.items()}
        )

    def __call__(self, *_: Any, **__: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise TypeError(f"{self.py_func.__qualname__} is for compiled code: call it there, or njit(function.py_func)")


def inner(function: Any) -> Any:
    """`njit` of a function that compiled code alone calls. From Python, a call of it is a `TypeError`.

    A division by zero gives what NumPy gives, so that no caller needs a path for errors.
    """
    made = cast("Any", njit)(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    made.__class__ = _Inner
    return made


class _Library(JITCodeLibrary):
    """A function and those that it calls. Machine code when it is asked for."""

    _waits = False

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

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

    @property
    def has_dynamic_globals(self) -> bool:
        self._ensure_finalized()
        self._make()  # optimisation removes the paths that mention them
        return super().has_dynamic_globals

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


_resolve: Any = BaseFunction.get_call_type
_resolved: dict[tuple[int, tuple[Any, ...]], tuple[Any, Any]] = {}
"""Signatures by function type and operands' types, with the function type: its id is in the key."""


def _resolve_once(self: Any, context: Any, args: Any, kws: Any) -> Any:
    """Replace `BaseFunction.get_call_type`. Remembers its results, because they depend only on the arguments."""
    if kws:
        return _resolve(self, context, args, kws)
    key = id(self), tuple(args)
    if key not in _resolved:
        _resolved[key] = self, _resolve(self, context, args, kws)
    return _resolved[key][1]


BaseFunction.get_call_type = _resolve_once


def _load_alone(self: Any, sig: Any, target_context: Any) -> Any:
    """`Cache.load_overload` without all that compiling needs: reading machine code takes Numba's run-time functions alone."""
    rtsys.initialize(target_context)
    with self._guard_against_spurious_io_errors():
        return self._load_overload(sig, target_context)


Cache.load_overload = _load_alone
