from __future__ import annotations

import io

from rich.console import Console

from paceline.cli.progress import opening_bar
from paceline.core.ids import NodeId
from paceline.ways.pipeline.executor.route import Opening


def test_lines_about_a_load_say_whose_layers_of_which_model() -> None:
    console = Console(file=io.StringIO(), width=200)
    with opening_bar(console, "big") as (reading, own, others):
        reading(1, 2)
        loading = own("layers 0 to 3 of big")
        for done in range(5):
            loading(done, 40)
        others(Opening(1, 4, nodes=(NodeId("ant"),)))
        others(Opening(2, 4, nodes=(NodeId("ant"), NodeId("bee"))))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "Reading big for its digest, once, 50 %",
        "Loading layers 0 to 3 of big here, 0 %",
        "Loading layers 0 to 3 of big here, 10 %",
        "ant loads its layers of big, 25 %",
        "ant and bee load their layers of big, 50 %",
    ]
