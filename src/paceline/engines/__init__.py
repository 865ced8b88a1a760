"""Foreign engines: servers of other makers that run whole models. One contract (`contract`), an adapter for each engine."""
