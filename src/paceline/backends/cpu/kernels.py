"""The functions that models run in compiled kernels, by name: which a model needs, how to compile one, and what that costs.

A name is also how the file of the function begins in the kernel cache: `module.function`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib import import_module
from pathlib import Path
from typing import Final

from paceline.backends.cpu.forms import Form

COSTS: Final = {
    "draw.draw_rows": 8.0,
    "products.multiply": 4.5,
    "tasks.do_heads": 3.8,
    "tasks.do_products": 3.1,
    "tasks.do_experts": 3.0,
    "tasks.do_rows": 2.9,
    "team.enter": 2.7,
    "rows.embed": 1.0,
    "pack.pack": 0.5,
}
"""Processor seconds of compiling a function on a Xeon at 2.5 GHz, without its form. Estimates of time left use their ratios alone."""


def kernels_of(forms: Collection[Form], embedding: Form | None, *, mixture: bool, draws: bool) -> list[str]:
    """Names of the functions that a model needs, in the order to compile them: those that pack weights, then the costly ones.

    Args:
        forms: of its matrices.
        embedding: the form of its embedding; None: it is not held here.
        mixture: the model has experts.
        draws: tokens are drawn here.
    """
    read = {min(forms), *([] if embedding is None else [embedding])}  # the first one by the model that gives the numerics id
    names = [*(f"products.multiply_{form.name.lower()}" for form in forms), *(f"rows.embed_{form.name.lower()}" for form in read)]
    names += ["team.enter", "tasks.do_rows", "tasks.do_heads", "tasks.do_products"]
    names += ["tasks.do_experts"] if mixture else []
    names += ["draw.draw_rows"] if draws else []
    return [*(f"pack.pack_{form.name.lower()}" for form in sorted(forms)), *sorted(names, key=cost_of, reverse=True)]


def cost_of(name: str) -> float:
    """Relative cost of compiling a function."""
    return next(cost for prefix, cost in COSTS.items() if name.startswith(prefix))


def is_packer(name: str) -> bool:
    """Return whether weights can't be packed before the function is compiled."""
    return name.startswith("pack.")


def missing(names: Iterable[str], folder: Path) -> list[str]:
    """Names of the functions that a kernel cache does not have."""
    there = {file.name.rpartition("-")[0] for file in folder.rglob("*.nbi")}
    return [name for name in names if name not in there]


def compile_kernel(name: str) -> None:
    """Compile a function, or read it from the kernel cache."""
    from paceline.backends.cpu import places

    module, _, function = name.partition(".")
    compiled = import_module(f"paceline.backends.cpu.{module}")  # which compiles those without a form: `draw_rows`
    form = Form.__members__.get(function.partition("_")[2].upper())
    match module:
        case "pack":
            compiled.packer(form)
        case "products":
            compiled.product(form)
        case "rows":
            compiled.reader(form)
        case "tasks":
            compiled.task_function(getattr(places, function.upper()))
        case "team":
            compiled.compile_enter()
        case _:
            pass
