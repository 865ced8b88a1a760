"""A model's layers while they are being fetched: a tensor can be read as soon as its pieces are on disk and checked, so that packing does not wait for
the last of them.

Law: what was not checked is never read. A reader waits for its pieces until they are there or the fetch is over, so the fetch must say that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from paceline.core.errors import PacelineError
from paceline.core.manifest import PIECE, ModelManifest, ModelPart, PieceRun, pieces_needed
from paceline.core.model import LayerRange, ModelSpec
from paceline.core.weights import StoredTensor
from paceline.store.catalog import open_weights
from paceline.store.digests import DigestCache
from paceline.store.faults import damaged
from paceline.store.home import Home
from paceline.store.selection import gguf_models
from paceline.store.tensor_files import TensorFiles

HEADS: Final = ModelPart(LayerRange(0, 0), edges=False)
"""What no layer and no edge has: files are opened by it."""


class Arrivals:
    """Which pieces of a model are here. Told by who fetches, asked from threads that wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._here: set[tuple[str, int]] = set()
        self._manifest: ModelManifest | None = None
        self._over: PacelineError | None = None

    def described(self, manifest: ModelManifest) -> None:
        """A source said what the model is made of."""
        with self._changed:
            self._manifest = manifest
            self._changed.notify_all()

    def came(self, runs: Iterable[PieceRun]) -> None:
        """Pieces were written, or found, and checked."""
        with self._changed:
            assert self._manifest is not None, "a piece is of what was described"
            self._here |= {(self._manifest.files[run.file].name, piece) for run in runs for piece in range(run.first, run.stop)}
            self._changed.notify_all()

    def end(self, error: PacelineError) -> None:
        """Nothing more comes. The first reason counts.

        Args:
            error: raised to who waits for what is not here.
        """
        with self._changed:
            self._over = self._over or error
            self._changed.notify_all()

    def heads(self) -> ModelManifest:
        """The description, once all that files are opened by is here. Waits.

        Raises:
            PacelineError: the fetch ended before.
        """
        self._wait(lambda: self._manifest is not None)
        manifest = self._manifest
        assert manifest is not None
        self.wait((manifest.files[run.file].name, piece) for run in pieces_needed(manifest, HEADS) for piece in range(run.first, run.stop))
        return manifest

    def wait(self, pieces: Iterable[tuple[str, int]]) -> None:
        """Until these pieces, by file and number, are here.

        Raises:
            PacelineError: the fetch ended before.
        """
        wanted = set(pieces)
        self._wait(lambda: wanted <= self._here)

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: holds() or self._over is not None)
            if not holds():
                assert self._over is not None
                raise self._over


class ArrivingWeights:
    """The tensors of a part of a model. A `WeightSource` whose `read` waits for what is on its way.

    Args:
        weights: the files, with holes.
        digest: of the whole model.
        part: what is fetched of it.
        arrivals: says which pieces are here.
    """

    def __init__(self, weights: TensorFiles, digest: str, part: ModelPart, folder: Path, arrivals: Arrivals) -> None:
        self._weights, self._folder, self._arrivals = weights, folder, arrivals
        self.digest: Final = digest
        self._names: Final = frozenset(name for name in weights.names() if part.needs(name))

    @property
    def spec(self) -> ModelSpec:
        """Of the whole model."""
        return self._weights.spec

    def names(self) -> Iterable[str]:
        return self._names

    def nbytes(self, name: str) -> int:
        return self._weights.nbytes(name)

    def type_of(self, name: str) -> str:
        return self._weights.type_of(name)

    def read(self, name: str, rows: slice | None = None) -> StoredTensor:
        """One tensor, once all of it is here.

        Raises:
            ModelFileError: it is not among those that are fetched.
            PacelineError: the fetch ended before it came.
        """
        if name not in self._names:
            raise damaged(self._weights.files[0], f"tensor {name} is not fetched")
        at = self._weights.places[name]
        file = at.path.relative_to(self._folder).as_posix()
        self._arrivals.wait((file, piece) for piece in range(at.offset // PIECE, -(-(at.offset + at.nbytes) // PIECE)))
        return self._weights.read(name, rows)


def open_arriving(part: ModelPart, home: Home, arrivals: Arrivals) -> ArrivingWeights:
    """Open what is being fetched, as soon as the heads of its files are here. Waits for them.

    Raises:
        PacelineError: the fetch ended before.
        ModelFileError, UnsupportedModel: the files can't be opened.
    """
    manifest = arrivals.heads()
    folder = home.partial / manifest.digest
    models = gguf_models(entry.name for entry in manifest.files)
    weights = open_weights(folder / next(iter(models)) if models else folder, DigestCache(home))
    return ArrivingWeights(weights, manifest.digest, part, folder, arrivals)
